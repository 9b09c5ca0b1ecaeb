// The `chiasma` program: registers the subcommands and turns failures into messages and exit codes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>

#include "chiasma/chiasma.h"
#include "cli/commands.h"
#include "cli/error.h"

namespace chiasma::cli {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 done, 1 a check failed, 2 bad usage or input, 3 device or kernel unavailable.\n"
    "`chiasma COMMAND --help` explains a command and its files.";

int parse_and_run(int argc, char** argv) {
  CLI::App app("FP8 sparse MLA decoding attention.", "chiasma");
  app.set_version_flag("--version", std::string("chiasma ") + chiasma_version());
  app.footer(kFooter);
  app.require_subcommand(1);
  int exit_code = kExitOk;
  register_demo(app, exit_code);
  register_decode(app, exit_code);
  register_quantize(app, exit_code);
  register_merge(app, exit_code);
  register_inspect(app, exit_code);
  register_verify(app, exit_code);
  register_bench(app, exit_code);
  register_budget(app, exit_code);
  register_info(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 reports --help and --version as "errors" of code 0, and has codes of its own for the others.
    return app.exit(error) == 0 ? kExitOk : kExitBadInput;
  }
  return exit_code;
}

int guarded_main(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const CommandError& error) {
    fmt::print(stderr, "chiasma: {}\n", error.what());
    return error.exit_code();
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "chiasma: not enough memory\n");
    return kExitUnavailable;
  } catch (const std::exception& error) {
    fmt::print(stderr, "chiasma: {}\n", error.what());
    return kExitBadInput;
  }
}

}  // namespace
}  // namespace chiasma::cli

int main(int argc, char** argv) {
  int exit_code = chiasma::cli::guarded_main(argc, argv);
  // A full disk shows only when the buffered text is flushed.
  if (std::fflush(stdout) != 0 && exit_code == chiasma::cli::kExitOk) {
    std::perror("chiasma: cannot write to standard output");
    exit_code = chiasma::cli::kExitBadInput;
  }
  return exit_code;
}
