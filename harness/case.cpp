#include "harness/case.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <set>
#include <sstream>

#include "format/kv_format.h"

namespace chiasma::harness {
namespace {

constexpr std::string_view kVerb = "decode";
constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxRequests = 1 << 20;
constexpr std::int64_t kMaxTopk = 1 << 20;
constexpr std::int64_t kMaxPage = 1 << 20;
constexpr std::int64_t kMaxSplits = 4096;
constexpr double kMaxQScale = 1e6;
constexpr double kMaxScale = std::numeric_limits<float>::max();

// One key: how its text becomes a member and back. read() returns "" or what is allowed.
struct Key {
  std::string_view name;
  std::function<std::string(std::string_view, Case&)> read;
  std::function<std::string(const Case&)> write;
};

template <typename Number>
bool read_number(std::string_view text, Number* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

Key integer_key(std::string_view name, std::int64_t Case::*member, std::int64_t low, std::int64_t high) {
  return {name,
          [=](std::string_view text, Case& spec) -> std::string {
            std::int64_t value = 0;
            if (!read_number(text, &value) || value < low || value > high) {
              return fmt::format("an integer from {} to {}", low, high);
            }
            spec.*member = value;
            return {};
          },
          [=](const Case& spec) { return fmt::format("{}", spec.*member); }};
}

Key real_key(std::string_view name, double Case::*member, double low, double high) {
  return {name,
          [=](std::string_view text, Case& spec) -> std::string {
            double value = 0;
            // Negated, so that NaN is refused too.
            if (!read_number(text, &value) || !(value >= low && value <= high)) {
              return fmt::format("a number from {} to {}", low, high);
            }
            spec.*member = value;
            return {};
          },
          [=](const Case& spec) { return fmt::format("{}", spec.*member); }};
}

template <typename Value>
using Choices = std::vector<std::pair<std::string_view, Value>>;

template <typename Value>
Key choice_key(std::string_view name, Value Case::*member, Choices<Value> choices) {
  return {name,
          [=](std::string_view text, Case& spec) -> std::string {
            std::string allowed = "one of";
            for (const auto& [label, value] : choices) {
              if (label == text) {
                spec.*member = value;
                return {};
              }
              allowed += fmt::format(" {}", label);
            }
            return allowed;
          },
          [=](const Case& spec) -> std::string {
            for (const auto& [label, value] : choices) {
              if (value == spec.*member) return std::string(label);
            }
            return "?";
          }};
}

Key smscale_key() {
  return {"smscale",
          [](std::string_view text, Case& spec) -> std::string {
            double value = 0;
            if (text == "default") {
              spec.smscale.reset();
            } else if (read_number(text, &value) && std::abs(value) <= kMaxScale) {
              spec.smscale = value;
            } else {
              return "default or a finite float32 number";
            }
            return {};
          },
          [](const Case& spec) { return spec.smscale ? fmt::format("{}", *spec.smscale) : std::string("default"); }};
}

Key seed_key() {
  return {"seed",
          [](std::string_view text, Case& spec) -> std::string {
            return read_number(text, &spec.seed) ? std::string() : "an integer from 0 to 18446744073709551615";
          },
          [](const Case& spec) { return fmt::format("{}", spec.seed); }};
}

Choices<LengthMode> length_choices() {
  return {{"none", LengthMode::kNone},
          {"full", LengthMode::kFull},
          {"random", LengthMode::kRandom},
          {"zero", LengthMode::kZero},
          {"rows", LengthMode::kRows}};
}

Choices<chiasma_kv_format> format_choices() {
  Choices<chiasma_kv_format> choices;
  for (const KvFormat format : kAllFormats) {
    choices.emplace_back(format_name(format), static_cast<chiasma_kv_format>(format));
  }
  return choices;
}

// In the order in which to_line() writes them.
const std::vector<Key>& keys() {
  static const std::vector<Key> all = {
      integer_key("b", &Case::b, 0, kMaxRequests),
      integer_key("h", &Case::h, 1, 128),
      integer_key("sq", &Case::sq, 0, kMaxRequests),
      integer_key("pool", &Case::pool, 0, kMaxInt32),
      integer_key("topk", &Case::topk, 0, kMaxTopk),
      integer_key("page", &Case::page, 1, kMaxPage),
      choice_key<chiasma_kv_format>("fmt", &Case::fmt, format_choices()),
      choice_key<IndexPattern>("idx", &Case::idx,
                               {{"random", IndexPattern::kRandom},
                                {"sorted", IndexPattern::kSorted},
                                {"window", IndexPattern::kWindow},
                                {"same", IndexPattern::kSame}}),
      choice_key<chiasma_scale_mode>("scale", &Case::scale,
                                     {{"pow2", CHIASMA_SCALE_POW2}, {"amax", CHIASMA_SCALE_AMAX}}),
      real_key("valid", &Case::valid, 0.0, 1.0),
      choice_key<bool>("garbage", &Case::garbage, {{"0", false}, {"1", true}}),
      choice_key<LengthMode>("len", &Case::len, length_choices()),
      choice_key<SinkMode>("sink", &Case::sink,
                           {{"none", SinkMode::kNone},
                            {"zero", SinkMode::kZero},
                            {"random", SinkMode::kRandom},
                            {"inf", SinkMode::kPlusInf},
                            {"-inf", SinkMode::kMinusInf}}),
      choice_key<Poison>("poison", &Case::poison, {{"none", Poison::kNone}, {"nan", Poison::kNan}}),
      choice_key<Layout>("layout", &Case::layout,
                         {{"packed", Layout::kPacked}, {"strided", Layout::kStrided}, {"odd", Layout::kOdd}}),
      choice_key<bool>("q", &Case::q_pair, {{"whole", false}, {"pair", true}}),
      choice_key<QueryNan>("qnan", &Case::qnan,
                           {{"none", QueryNan::kNone}, {"some", QueryNan::kSome}, {"all", QueryNan::kAll}}),
      choice_key<Distribution>("dist", &Case::dist,
                               {{"gauss", Distribution::kGauss},
                                {"outlier", Distribution::kOutlier},
                                {"const", Distribution::kConst},
                                {"extreme", Distribution::kExtreme}}),
      smscale_key(),
      real_key("qscale", &Case::qscale, 0.0, kMaxQScale),
      integer_key("xpool", &Case::xpool, 0, kMaxInt32),
      integer_key("xtopk", &Case::xtopk, 0, kMaxTopk),
      integer_key("xpage", &Case::xpage, 1, kMaxPage),
      choice_key<LengthMode>("xlen", &Case::xlen, length_choices()),
      integer_key("splits", &Case::splits, 0, kMaxSplits),
      choice_key<bool>("invariant", &Case::invariant, {{"0", false}, {"1", true}}),
      seed_key(),
  };
  return all;
}

const Key* find_key(std::string_view name) {
  for (const Key& key : keys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

std::string key_names() {
  std::string names;
  for (const Key& key : keys()) names += fmt::format("{}{}", names.empty() ? "" : " ", key.name);
  return names;
}

std::vector<std::string_view> split_words(std::string_view line) {
  constexpr std::string_view kBlanks = " \t\r\n";
  std::vector<std::string_view> words;
  for (std::size_t start = line.find_first_not_of(kBlanks); start != std::string_view::npos;) {
    const std::size_t end = std::min(line.find_first_of(kBlanks, start), line.size());
    words.push_back(line.substr(start, end - start));
    start = line.find_first_not_of(kBlanks, end);
  }
  return words;
}

bool parse_word(std::string_view word, Case* out, std::set<std::string_view>* seen, std::string* error) {
  const std::size_t equals = word.find('=');
  if (equals == std::string_view::npos) {
    *error = fmt::format("'{}' is not of the form key=value", word);
    return false;
  }
  const std::string_view name = word.substr(0, equals);
  const std::string_view value = word.substr(equals + 1);
  const Key* key = find_key(name);
  if (key == nullptr) {
    *error = fmt::format("unknown key '{}' in '{}'; the keys are: {}", name, word, key_names());
    return false;
  }
  if (!seen->insert(key->name).second) {
    *error = fmt::format("key '{}' is given twice, the second time as '{}'", name, word);
    return false;
  }
  if (const std::string allowed = key->read(value, *out); !allowed.empty()) {
    *error = fmt::format("{} is '{}', but must be {}", name, value, allowed);
    return false;
  }
  return true;
}

// Slots of a pool must be nameable by an int32 index, the spare page included.
bool slots_fit(std::int64_t b, std::int64_t pool, std::int64_t page) {
  const std::int64_t pages_per_request = (pool + page - 1) / page;
  return (static_cast<double>(b) * static_cast<double>(pages_per_request) + 1) * static_cast<double>(page) <=
         static_cast<double>(kMaxInt32);
}

}  // namespace

double Case::kv_scale() const {
  // No power of two, and some five deviations of the values fit.
  constexpr double kScale = 0.0117f;
  return traits_of(static_cast<KvFormat>(fmt)).scale_type == ScaleType::cache ? kScale : 0.0;
}

double Case::multiply_adds() const {
  const double width = key_dim(static_cast<KvFormat>(fmt)) + kValueDim;
  return static_cast<double>(b) * static_cast<double>(sq * h) * static_cast<double>(topk + xtopk) * width;
}

bool validate_case(const Case& spec, std::string* error) {
  const RowTraits traits = traits_of(static_cast<KvFormat>(spec.fmt));
  if (traits.scale_type == ScaleType::ue8m0 && spec.scale == CHIASMA_SCALE_AMAX) {
    *error = fmt::format("scale is 'amax', but fmt={} stores powers of two only: use scale=pow2", traits.name);
    return false;
  }
  if (spec.has_extra() && !traits.has_second_cache) {
    *error = fmt::format("xpool is {}, but fmt={} has no second cache: use xpool=0", spec.xpool, traits.name);
    return false;
  }
  if (spec.q_pair && !traits.has_rope) {
    *error = fmt::format("q is 'pair', but queries of fmt={} have no rotary columns: use q=whole", traits.name);
    return false;
  }
  if (!spec.has_extra() && (spec.xtopk != 0 || spec.xlen != LengthMode::kNone)) {
    *error = "xtopk or xlen is given without a second cache: add xpool=TOKENS, with fmt=v4, v41 or v41plane";
    return false;
  }
  if (!slots_fit(spec.b, spec.pool, spec.page) || !slots_fit(spec.b, spec.xpool, spec.xpage)) {
    *error = fmt::format("b={} requests of whole pages for pool={} (xpool={}) tokens and a spare page exceed {} slots",
                         spec.b, spec.pool, spec.xpool, kMaxInt32);
    return false;
  }
  return true;
}

bool parse_case(std::string_view line, Case* out, std::string* error) {
  *out = Case{};
  const std::vector<std::string_view> words = split_words(line);
  if (words.empty() || words.front() != kVerb) {
    *error = fmt::format("a case begins with '{}', not with '{}'", kVerb, words.empty() ? "" : words.front());
    return false;
  }
  std::set<std::string_view> seen;
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (!parse_word(words[i], out, &seen, error)) return false;
  }
  return validate_case(*out, error);
}

std::string to_line(const Case& spec) {
  static const Case kDefault;
  std::string line(kVerb);
  for (const Key& key : keys()) {
    const std::string value = key.write(spec);
    if (value != key.write(kDefault)) line += fmt::format(" {}={}", key.name, value);
  }
  return line;
}

bool read_cases(std::string_view text, const std::string& name, std::vector<Case>* out, std::string* error) {
  out->clear();
  int number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    line = line.substr(0, line.find('#'));
    if (split_words(line).empty()) continue;
    Case spec;
    if (!parse_case(line, &spec, error)) {
      *error = fmt::format("{}:{}: {}", name, number, *error);
      return false;
    }
    out->push_back(spec);
  }
  return true;
}

bool read_case_file(const std::filesystem::path& path, std::vector<Case>* out, std::string* error) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  // An empty file leaves `text` failed, which is no error. A directory can be opened, but not read.
  if (file) text << file.rdbuf();
  if (!file || file.bad() || std::filesystem::is_directory(path)) {
    *error = fmt::format("{}: cannot be read", path.string());
    return false;
  }
  return read_cases(text.str(), path.string(), out, error);
}

}  // namespace chiasma::harness
