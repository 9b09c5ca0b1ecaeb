// A case: one line of text that describes one decode call completely. The same line works in verify, bench, the tests
// and the fuzzer, so a failure anywhere is reproduced by pasting its line. docs/cases.md explains every key.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chiasma/chiasma.h"

namespace chiasma::harness {

enum class IndexPattern { kRandom, kSorted, kWindow, kSame };
enum class LengthMode { kNone, kFull, kRandom, kZero, kRows };
enum class QueryNan { kNone, kSome, kAll };
enum class SinkMode { kNone, kZero, kRandom, kPlusInf, kMinusInf };
enum class Poison { kNone, kNan };
enum class Layout { kPacked, kStrided, kOdd };
enum class Distribution { kGauss, kOutlier, kConst, kExtreme };

// Member names are the keys of the line.
struct Case {
  std::int64_t b = 2;
  std::int64_t h = 128;
  std::int64_t sq = 1;
  std::int64_t pool = 4096;  // tokens per request
  std::int64_t topk = 2048;
  std::int64_t page = 64;
  chiasma_kv_format fmt = CHIASMA_KV_V32;
  IndexPattern idx = IndexPattern::kRandom;
  chiasma_scale_mode scale = CHIASMA_SCALE_POW2;
  double valid = 1.0;    // fraction of entries that select something
  bool garbage = false;  // the others hold arbitrary integers instead of -1
  LengthMode len = LengthMode::kNone;
  SinkMode sink = SinkMode::kNone;
  Poison poison = Poison::kNone;
  Layout layout = Layout::kPacked;
  QueryNan qnan = QueryNan::kNone;
  bool q_pair = false;  // key q: the query's rotary columns are a tensor of their own
  Distribution dist = Distribution::kGauss;
  std::optional<double> smscale;  // absent: chiasma_default_sm_scale()
  double qscale = 1.0;            // factor on q; with dist=gauss the scores' standard deviation
  std::uint64_t seed = 1;

  // The second cache of v4; present when xpool > 0.
  std::int64_t xpool = 0;
  std::int64_t xtopk = 0;
  std::int64_t xpage = 64;
  LengthMode xlen = LengthMode::kNone;

  // How it is run rather than what is computed.
  std::int64_t splits = 0;  // 0: automatic
  bool invariant = false;

  bool has_extra() const { return xpool > 0; }
  // The scale of formats with one for the whole cache; 0 elsewhere.
  double kv_scale() const;
  double sm_scale() const { return smscale ? *smscale : chiasma_default_sm_scale(fmt); }
  std::int64_t num_rows() const { return b * sq; }
  // Multiply-adds of the matrix products if every entry counts.
  double multiply_adds() const;

  friend bool operator==(const Case&, const Case&) = default;
};

// False: *error names the key, the value and what is allowed; *out is unspecified.
bool parse_case(std::string_view line, Case* out, std::string* error);

// Checks what no single key can: combinations and total sizes. parse_case() has done this already.
bool validate_case(const Case& spec, std::string* error);

// "decode" and the keys that differ from their defaults, in a fixed order. parse_case(to_line(c)) gives c back.
std::string to_line(const Case& spec);

// '#' starts a comment, blank lines are skipped. Errors begin with "file:line: ".
bool read_case_file(const std::filesystem::path& path, std::vector<Case>* out, std::string* error);
// The same for a text already in memory; `name` stands for the file in messages.
bool read_cases(std::string_view text, const std::string& name, std::vector<Case>* out, std::string* error);

}  // namespace chiasma::harness
