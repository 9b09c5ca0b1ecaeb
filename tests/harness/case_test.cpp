// Case lines: what is accepted, what is refused and how, and that a line survives being read and written.
#include "harness/case.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "harness/smoke_cases.h"

namespace chiasma::harness {
namespace {

Case parsed(const std::string& line) {
  Case spec;
  std::string error;
  EXPECT_TRUE(parse_case(line, &spec, &error)) << line << ": " << error;
  return spec;
}

std::string error_of(const std::string& line) {
  Case spec;
  std::string error;
  EXPECT_FALSE(parse_case(line, &spec, &error)) << line;
  return error;
}

void expect_mentions(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' in: " << message;
}

TEST(Case, BareLineHasTheDefaults) {
  const Case spec = parsed("decode");
  EXPECT_EQ(spec, Case{});
  EXPECT_EQ(spec.b, 2);
  EXPECT_EQ(spec.h, 128);
  EXPECT_EQ(spec.topk, 2048);
  EXPECT_EQ(spec.pool, 4096);
  EXPECT_EQ(to_line(spec), "decode");
}

TEST(Case, EveryKeyIsReadAndWritten) {
  const std::string line =
      "decode b=3 h=5 sq=4 pool=77 topk=9 page=61 fmt=v4 idx=sorted valid=0.25 garbage=1 len=random sink=-inf "
      "poison=nan "
      "layout=odd q=pair qnan=some dist=outlier smscale=-0.125 qscale=2.5 xpool=12 xtopk=7 xpage=2 xlen=zero splits=6 "
      "invariant=1 "
      "seed=18446744073709551615";
  const Case spec = parsed(line);
  EXPECT_EQ(spec.b, 3);
  EXPECT_EQ(spec.h, 5);
  EXPECT_EQ(spec.sq, 4);
  EXPECT_EQ(spec.fmt, CHIASMA_KV_V4);
  EXPECT_EQ(spec.sink, SinkMode::kMinusInf);
  EXPECT_EQ(spec.layout, Layout::kOdd);
  EXPECT_TRUE(spec.q_pair);
  EXPECT_EQ(spec.smscale, -0.125);
  EXPECT_EQ(spec.xlen, LengthMode::kZero);
  EXPECT_TRUE(spec.invariant);
  EXPECT_EQ(spec.seed, 18446744073709551615u);
  EXPECT_EQ(to_line(spec), line);
  EXPECT_EQ(to_line(parsed("decode scale=amax fmt=bf16")), "decode fmt=bf16 scale=amax");
}

TEST(Case, OrderAndBlanksDoNotMatter) {
  EXPECT_EQ(parsed("  decode\t topk=65   b=1 \r"), parsed("decode b=1 topk=65"));
}

TEST(Case, RealNumbersSurviveExactly) {
  for (const char* text : {"0.1", "1e-30", "-3.4e38", "0.30000000000000004"}) {
    const Case spec = parsed(std::string("decode smscale=") + text);
    EXPECT_EQ(parsed(to_line(spec)).smscale, spec.smscale) << text;
  }
  EXPECT_FALSE(parsed("decode smscale=default").smscale.has_value());
}

TEST(Case, AllCaseFilesSurviveTheRoundTrip) {
  for (const char* name : {"smoke", "edge", "perf"}) {
    const auto path = std::filesystem::path(CHIASMA_SOURCE_DIR) / "cases" / (std::string(name) + ".cases");
    std::vector<Case> cases;
    std::string error;
    ASSERT_TRUE(read_case_file(path, &cases, &error)) << error;
    EXPECT_FALSE(cases.empty());
    for (const Case& spec : cases) EXPECT_EQ(parsed(to_line(spec)), spec);
  }
}

TEST(Case, BuiltInCasesAreTheSmokeFile) {
  std::vector<Case> from_file, built_in;
  std::string error;
  ASSERT_TRUE(read_case_file(std::filesystem::path(CHIASMA_SOURCE_DIR) / "cases/smoke.cases", &from_file, &error))
      << error;
  ASSERT_TRUE(read_cases(kSmokeCases, "built in", &built_in, &error)) << error;
  EXPECT_EQ(from_file, built_in);
}

TEST(Case, ErrorsNameKeyValueAndWhatIsAllowed) {
  expect_mentions(error_of("decode hq=3"), {"hq", "hq=3", "topk"});
  expect_mentions(error_of("decode h=3 b=2 h=4"), {"h=4", "twice"});
  expect_mentions(error_of("decode h=129"), {"h", "129", "1 to 128"});
  expect_mentions(error_of("decode h=0"), {"0", "1 to 128"});
  expect_mentions(error_of("decode page=0"), {"page", "0"});
  expect_mentions(error_of("decode topk=-1"), {"topk", "-1"});
  expect_mentions(error_of("decode b=2x"), {"b", "2x"});
  expect_mentions(error_of("decode b="), {"b", "integer"});
  expect_mentions(error_of("decode b=99999999999999999999"), {"99999999999999999999"});
  expect_mentions(error_of("decode fmt=v3"), {"v3", "v32", "v4", "bf16"});
  expect_mentions(error_of("decode valid=1.5"), {"valid", "1.5", "0 to 1"});
  expect_mentions(error_of("decode valid=nan"), {"valid", "nan"});
  expect_mentions(error_of("decode smscale=inf"), {"smscale", "inf", "finite"});
  expect_mentions(error_of("decode smscale=1e39"), {"smscale", "1e39"});
  expect_mentions(error_of("decode garbage=yes"), {"garbage", "yes", "0 1"});
  expect_mentions(error_of("decode seed=-1"), {"seed", "-1"});
  expect_mentions(error_of("decode nonsense"), {"nonsense", "key=value"});
  expect_mentions(error_of("merge b=1"), {"decode", "merge"});
  expect_mentions(error_of(""), {"decode"});
}

TEST(Case, CombinationsAreChecked) {
  expect_mentions(error_of("decode fmt=v4 scale=amax"), {"amax", "pow2"});
  expect_mentions(error_of("decode xpool=10"), {"xpool", "v32 has no second cache"});
  expect_mentions(error_of("decode fmt=v41 scale=amax"), {"amax", "v41"});
  expect_mentions(error_of("decode fmt=v32nope q=pair"), {"pair", "v32nope"});
  expect_mentions(error_of("decode fmt=v4 xtopk=10"), {"xtopk", "xpool"});
  expect_mentions(error_of("decode b=1000 pool=3000000"), {"slots"});
  // Whole pages count, not tokens.
  expect_mentions(error_of("decode b=100000 pool=1 page=1048576"), {"slots"});
}

TEST(Case, FilesHaveCommentsAndNumberedErrors) {
  std::vector<Case> cases;
  std::string error;
  EXPECT_TRUE(read_cases("# a comment\n\n  \ndecode b=1 # the rest\r\ndecode b=3", "text", &cases, &error)) << error;
  ASSERT_EQ(cases.size(), 2u);
  EXPECT_EQ(cases[1].b, 3);
  EXPECT_FALSE(read_cases("decode\n\ndecode b=x\n", "some.cases", &cases, &error));
  expect_mentions(error, {"some.cases:3: ", "b is 'x'"});
}

TEST(Case, UnreadableFilesAreErrors) {
  std::vector<Case> cases;
  std::string error;
  EXPECT_FALSE(read_case_file("/nonexistent/x.cases", &cases, &error));
  expect_mentions(error, {"/nonexistent/x.cases"});
  EXPECT_FALSE(read_case_file(std::filesystem::temp_directory_path(), &cases, &error));
  const auto path = std::filesystem::path(testing::TempDir()) / "empty.cases";
  std::ofstream(path).close();
  EXPECT_TRUE(read_case_file(path, &cases, &error)) << error;
  EXPECT_TRUE(cases.empty());
}

}  // namespace
}  // namespace chiasma::harness
