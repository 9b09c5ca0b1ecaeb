#include "cli/budget_report.h"

#include <fmt/format.h>

namespace chiasma::cli {
namespace {

double per_clk(double device_rate, int multiprocessors, double sm_mhz) {
  return device_rate * 1e6 / (multiprocessors * sm_mhz);
}

bool is_per_multiprocessor(const ceilings::Figure& figure) {
  return figure.unit.ends_with("/clk/SM");
}

// The whole device's rate in units of 10^12 a second, at the clock of the measurement.
double device_total(const ceilings::Figure& figure, int multiprocessors) {
  const double median = harness::summarize(figure.samples).median;
  if (!is_per_multiprocessor(figure)) return median;
  return median * figure.distinct * multiprocessors * figure.sm_mhz * 1e-6;
}

}  // namespace

Compared compare(const KernelTime& time, std::span<const tile::Need> needs, const Figures& figures,
                 const harness::Case& spec, int multiprocessors) {
  const auto rate_of = [&](std::string_view id) {
    const ceilings::Figure* figure = ceilings::find(figures, id);
    if (figure == nullptr) return 0.0;
    const double median = harness::summarize(figure->samples).median;
    return is_per_multiprocessor(*figure) ? median : per_clk(median, multiprocessors, time.sm_mhz);
  };
  const double us = time.loop_us.median;
  Compared compared{time, make_budget(needs, rate_of), blocks_per_multiprocessor(spec, multiprocessors)};
  compared.clk = clk_per_block(us, time.sm_mhz, compared.blocks);
  compared.tflops = 2.0 * spec.multiply_adds() / us * 1e-6;
  return compared;
}

void print_figures(const Figures& figures, int multiprocessors) {
  fmt::print("\nceilings: median [10th .. 90th percentile] of {} launches\n", figures.front().samples.size());
  for (const ceilings::Figure& figure : figures) {
    const harness::Statistics value = harness::summarize(figure.samples);
    std::string more;
    if (is_per_multiprocessor(figure)) {
      more = fmt::format("; {:.2f} T{}/s at {:.0f} MHz", device_total(figure, multiprocessors),
                         figure.unit.substr(0, figure.unit.find('/')), figure.sm_mhz);
    }
    if (figure.lot > 0) more += fmt::format("; {} in {:.1f} clk", figure.lot_name, figure.lot / value.median);
    fmt::print("  {:<32} {:8.2f} [{:.2f} .. {:.2f}] {}{}  ({})\n", figure.id, value.median, value.p10, value.p90,
               figure.unit, more, figure.what);
  }
}

Json figures_json(const Figures& figures, int multiprocessors) {
  Json list = Json::array();
  for (const ceilings::Figure& figure : figures) {
    const harness::Statistics value = harness::summarize(figure.samples);
    Json entry = {{"id", figure.id},         {"what", figure.what},
                  {"unit", figure.unit},     {"value", statistics_json(value)},
                  {"sm_mhz", figure.sm_mhz}, {"device_tera_per_s", device_total(figure, multiprocessors)}};
    if (figure.lot > 0) entry["clk"] = {{"of", figure.lot_name}, {"median", figure.lot / value.median}};
    list.push_back(std::move(entry));
  }
  return list;
}

void print_kernel(const Compared& compared) {
  fmt::print("\n{}: needs of a block\n", compared.time.kernel);
  for (const BudgetLine& line : compared.budget.lines) {
    fmt::print("  {:<14} {:<14} {:>10.0f} {:<6} at {:8.2f} a clk ({}): {:6.0f} clk\n", line.need.stage,
               tile::name_of(line.need.resource), line.need.amount, tile::unit_of(line.need.resource), line.rate,
               line.need.ceiling, line.clk);
  }
  fmt::print("  by resource:");
  const char* separator = " ";
  for (const ResourceTime& time : compared.budget.resources) {
    fmt::print("{}{} {:.0f}", separator, tile::name_of(time.resource), time.clk);
    separator = ", ";
  }
  const ResourceTime& busiest = compared.budget.resources.front();
  const harness::Statistics& loop = compared.time.loop_us;
  fmt::print("\n  bottleneck: {}, {:.0f} clk/block\n", tile::name_of(busiest.resource), busiest.clk);
  fmt::print(
      "  measured: {:.0f} clk/block, {:.2f} times that ({:.1f} us [{:.1f} .. {:.1f}], {:.0f} TFLOPS, {:.1f} blocks "
      "a multiprocessor, {:.0f} MHz)\n",
      compared.clk, compared.clk / busiest.clk, loop.median, loop.p10, loop.p90, compared.tflops, compared.blocks,
      compared.time.sm_mhz);
}

Json kernel_json(const Compared& compared) {
  Json needs = Json::array();
  for (const BudgetLine& line : compared.budget.lines) {
    needs.push_back({{"stage", line.need.stage},
                     {"resource", tile::name_of(line.need.resource)},
                     {"amount", line.need.amount},
                     {"unit", tile::unit_of(line.need.resource)},
                     {"ceiling", line.need.ceiling},
                     {"per_clk", line.rate},
                     {"clk", line.clk}});
  }
  Json resources = Json::object();
  for (const ResourceTime& time : compared.budget.resources) resources[tile::name_of(time.resource)] = time.clk;
  return {{"kernel", compared.time.kernel},
          {"needs_of_a_block", std::move(needs)},
          {"clk_by_resource", std::move(resources)},
          {"bottleneck", tile::name_of(compared.budget.resources.front().resource)},
          {"measured_clk_per_block", compared.clk},
          {"blocks_per_multiprocessor", compared.blocks},
          {"sm_mhz", compared.time.sm_mhz},
          {"loop_us", statistics_json(compared.time.loop_us)},
          {"tflops", compared.tflops},
          {"error", report_json(compared.time.report)}};
}

}  // namespace chiasma::cli
