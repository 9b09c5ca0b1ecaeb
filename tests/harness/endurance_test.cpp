// Burst and sustained times, and the meters behind their energy, which most machines that run this do not have.
#include "harness/endurance.h"

#include <gtest/gtest.h>

#include "harness/nvml.h"

namespace chiasma::harness {
namespace {

TEST(Endurance, OnTheCpuGivesTimesAndNoEnergy) {
  Case spec;
  std::string message;
  ASSERT_TRUE(parse_case("decode b=1 h=2 pool=40 topk=9", &spec, &message)) << message;
  const std::unique_ptr<Workload> workload = Workload::make(spec, &message);
  ASSERT_NE(workload, nullptr) << message;
  const std::unique_ptr<Device> device = open_cpu_device();
  RunError error;
  const std::unique_ptr<Runner> runner = Runner::make(*workload, *device, {}, &error);
  ASSERT_NE(runner, nullptr) << error.message;
  Endurance result;
  ASSERT_TRUE(measure_endurance(*runner, {0.001, 0.01, 0.02}, &result, &error)) << error.message;
  EXPECT_GT(result.burst_us, 0);
  EXPECT_GT(result.burst_samples, 0);
  EXPECT_GT(result.sustained_us, 0);
  EXPECT_GT(result.sustained_calls, 0);
  EXPECT_FALSE(result.joules_a_call.has_value());
  EXPECT_TRUE(result.clock_event_reasons.empty());
}

TEST(Nvml, AnUnknownDeviceHasAReasonAndNoReadings) {
  const Nvml nvml("ffff:ff:1f.0");
  EXPECT_FALSE(nvml.why_not().empty());
  EXPECT_EQ(nvml.driver_version(), "unknown");
  EXPECT_FALSE(nvml.energy_joules().has_value());
  EXPECT_FALSE(nvml.watts().has_value());
  EXPECT_FALSE(nvml.sm_mhz().has_value());
  EXPECT_EQ(nvml.clock_event_reasons(), 0u);
}

TEST(Nvml, ReasonsHaveNames) {
  EXPECT_EQ(clock_event_names(0x1), std::vector<std::string>{});
  EXPECT_EQ(clock_event_names(0x4 | 0x40 | 0x1), (std::vector<std::string>{"sw_power_cap", "hw_thermal_slowdown"}));
}

}  // namespace
}  // namespace chiasma::harness
