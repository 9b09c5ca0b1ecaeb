// The subcommands of `chiasma`, one file each (cmd_*.cpp). A register function adds its subcommand to the application;
// when the user chose it, it runs during parsing and leaves its result in exit_code. Failures are thrown as
// CommandError (cli/error.h), which main() prints and turns into an exit code.
#pragma once

namespace CLI {
class App;
}

namespace chiasma::cli {

void register_demo(CLI::App& app, int& exit_code);
void register_decode(CLI::App& app, int& exit_code);
void register_quantize(CLI::App& app, int& exit_code);  // quantize and dequantize
void register_merge(CLI::App& app, int& exit_code);
void register_inspect(CLI::App& app, int& exit_code);
void register_verify(CLI::App& app, int& exit_code);
void register_bench(CLI::App& app, int& exit_code);
void register_budget(CLI::App& app, int& exit_code);
void register_info(CLI::App& app, int& exit_code);

}  // namespace chiasma::cli
