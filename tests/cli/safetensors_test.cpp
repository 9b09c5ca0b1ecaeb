// The safetensors reader refuses every malformed file with a message that says what is wrong, and reads what the writer
// wrote.
#include "cli/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

namespace chiasma::cli {
namespace {

namespace fs = std::filesystem;

// A file in memory: length, header, `data_bytes` bytes that count up.
std::vector<std::byte> file_bytes(std::string_view header, std::size_t data_bytes) {
  std::vector<std::byte> bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<std::byte>(std::uint64_t{header.size()} >> 8 * i));
  for (const char character : header) bytes.push_back(static_cast<std::byte>(character));
  for (std::size_t i = 0; i < data_bytes; ++i) bytes.push_back(static_cast<std::byte>(i));
  return bytes;
}

std::string parse_error(std::span<const std::byte> bytes) {
  try {
    SafetensorsFile::parse(bytes, "some.file");
  } catch (const SafetensorsError& error) {
    return error.what();
  }
  return "accepted";
}

struct Malformed {
  const char* what;
  std::string header;
  std::size_t data_bytes;
  const char* message;
};

void PrintTo(const Malformed& malformed, std::ostream* out) {
  *out << malformed.what;
}

std::string tensor(const char* dtype, const char* shape, const char* offsets) {
  return std::string(R"({"x":{"dtype":)") + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

class MalformedHeader : public testing::TestWithParam<Malformed> {};

TEST_P(MalformedHeader, IsRefusedWithItsReason) {
  const std::string error = parse_error(file_bytes(GetParam().header, GetParam().data_bytes));
  EXPECT_NE(error.find(GetParam().message), std::string::npos) << error;
  EXPECT_EQ(error.rfind("some.file: ", 0), 0u) << "the message must begin with the file: " << error;
}

INSTANTIATE_TEST_SUITE_P(
    Safetensors, MalformedHeader,
    testing::Values(
        Malformed{"empty header", "", 0, "must begin with '{'"},
        Malformed{"space first", " {}", 0, "must begin with '{'"},
        Malformed{"byte order mark", "\xef\xbb\xbf{}", 0, "must begin with '{'"},
        Malformed{"array", "[]", 0, "must begin with '{'"}, Malformed{"unclosed", "{", 0, "not valid JSON"},
        Malformed{"trailing text", "{} x", 0, "not valid JSON"},
        Malformed{"second document", "{}{}", 0, "not valid JSON"},
        Malformed{"NUL hides the rest", std::string("{}\0{", 4), 0, "NUL at byte 2"},
        Malformed{"not UTF-8", "{\"\xff\":1}", 0, "ill-formed UTF-8"},
        Malformed{"overlong UTF-8", "{\"\xc0\xaf\":1}", 0, "ill-formed UTF-8"},
        Malformed{"UTF-8 surrogate", "{\"\xed\xa0\x80\":1}", 0, "ill-formed UTF-8"},
        Malformed{"lone escaped surrogate", R"({"\ud800":1})", 0, "not valid JSON"},
        Malformed{"tensor is a number", R"({"x":5})", 0, "\"x\": must be an object, not 5"},
        Malformed{"tensor is null", R"({"x":null})", 0, "\"x\": must be an object, not null"},
        Malformed{"tensor is an array", R"({"x":[]})", 0, "\"x\": must be an object, not an array"},
        Malformed{"deep arrays", "{\"x\":" + std::string(1000000, '['), 0, "must be an object, not an array"},
        Malformed{"deep objects in a tensor", R"({"x":{"shape":{"a":{}}}})", 0, "must be an array of integers"},
        Malformed{"deep shape", R"({"x":{"shape":[[1]]}})", 0, "must hold non-negative 64-bit integers, not an array"},
        Malformed{"duplicate tensor",
                  R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[0],)"
                  R"("data_offsets":[0,0]}})",
                  0, "the name \"x\" occurs twice"},
        Malformed{"duplicate metadata", R"({"__metadata__":{},"__metadata__":{}})", 0, "\"__metadata__\" occurs twice"},
        Malformed{"duplicate metadata key", R"({"__metadata__":{"k":"1","k":"2"}})", 0, "\"k\" occurs twice"},
        Malformed{"duplicate field", R"({"x":{"dtype":"U8","dtype":"U8"}})", 0, "dtype occurs twice"},
        Malformed{"unknown field", R"({"x":{"stride":[1]}})", 0, "unknown field \"stride\""},
        Malformed{"metadata is text", R"({"__metadata__":"hello"})", 0, "\"__metadata__\": must be an object"},
        Malformed{"metadata number", R"({"__metadata__":{"sm_scale":0.5}})", 0, "must be a string, not 0.5"},
        Malformed{"metadata null", R"({"__metadata__":{"k":null}})", 0, "must be a string, not null"},
        Malformed{"metadata object", R"({"__metadata__":{"k":{}}})", 0, "must be a string, not an object"},
        Malformed{"no dtype", R"({"x":{"shape":[0],"data_offsets":[0,0]}})", 0, "dtype is missing"},
        Malformed{"no shape", R"({"x":{"dtype":"U8","data_offsets":[0,0]}})", 0, "shape is missing"},
        Malformed{"no offsets", R"({"x":{"dtype":"U8","shape":[0]}})", 0, "data_offsets is missing"},
        Malformed{"empty tensor object", R"({"x":{}})", 0, "dtype is missing"},
        Malformed{"unknown dtype", tensor("\"U9\"", "[1]", "[0,1]"), 1, "unknown dtype \"U9\""},
        Malformed{"lower-case dtype", tensor("\"bf16\"", "[1]", "[0,2]"), 2, "unknown dtype \"bf16\""},
        Malformed{"dtype number", tensor("16", "[1]", "[0,1]"), 1, "dtype: must be a string, not 16"},
        Malformed{"dtype array", tensor("[]", "[1]", "[0,1]"), 1, "dtype: must be a string, not an array"},
        Malformed{"negative extent", tensor("\"U8\"", "[-1]", "[0,1]"), 1,
                  "shape: must hold non-negative 64-bit integers, not -1"},
        Malformed{"fraction", tensor("\"U8\"", "[1.5]", "[0,1]"), 1, "not 1.5"},
        Malformed{"exponent", tensor("\"U8\"", "[1e0]", "[0,1]"), 1, "not 1e0"},
        Malformed{"extent text", tensor("\"U8\"", "[\"1\"]", "[0,1]"), 1, "not \"1\""},
        Malformed{"extent true", tensor("\"U8\"", "[true]", "[0,1]"), 1, "not true"},
        Malformed{"extent null", tensor("\"U8\"", "[null]", "[0,1]"), 1, "not null"},
        Malformed{"shape text", tensor("\"U8\"", "\"1\"", "[0,1]"), 1, "shape: must be an array of integers"},
        Malformed{"shape number", tensor("\"U8\"", "1", "[0,1]"), 1, "shape: must be an array of integers"},
        Malformed{"extent of 2^63", tensor("\"U8\"", "[9223372036854775808]", "[0,1]"), 1, "is too large"},
        Malformed{"extent of 2^64", tensor("\"U8\"", "[18446744073709551616]", "[0,1]"), 1, "must hold non-negative"},
        Malformed{"product overflows", tensor("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0, "the size overflows"},
        Malformed{"bytes overflow", tensor("\"F64\"", "[2305843009213693952]", "[0,0]"), 0, "the size overflows"},
        Malformed{"overflow beside a zero", tensor("\"U8\"", "[0,4294967296,4294967296]", "[0,0]"), 0,
                  "the size overflows"},
        Malformed{"one offset", tensor("\"U8\"", "[1]", "[0]"), 1, "must be 2 integers, not 1"},
        Malformed{"three offsets", tensor("\"U8\"", "[1]", "[0,1,1]"), 1, "must be 2 integers, not 3"},
        Malformed{"negative offset", tensor("\"U8\"", "[1]", "[-1,0]"), 1, "data_offsets: must hold"},
        Malformed{"begin behind end", tensor("\"U8\"", "[1]", "[1,0]"), 1, "begin lies behind end"},
        Malformed{"end behind the file", tensor("\"U8\"", "[2]", "[0,2]"), 1, "beyond the file's 1 bytes"},
        Malformed{"huge offsets", tensor("\"U8\"", "[1]", "[18446744073709551614,18446744073709551615]"), 1,
                  "beyond the file's 1 bytes"},
        Malformed{"too few bytes", tensor("\"BF16\"", "[2,3]", "[0,11]"), 11, "11 bytes, but BF16 [2, 3] takes 12"},
        Malformed{"scalar takes one element", tensor("\"F32\"", "[]", "[0,0]"), 0, "0 bytes, but F32 [] takes 4"},
        Malformed{"half a byte", tensor("\"F4\"", "[3]", "[0,1]"), 1, "not a whole number of bytes"},
        Malformed{"starts late", tensor("\"U8\"", "[1]", "[1,2]"), 2, "leaves a hole"},
        Malformed{"bytes behind the last", tensor("\"U8\"", "[1]", "[0,1]"), 2, "take 1 bytes, but 2 bytes follow"},
        Malformed{"bytes behind nothing", "{}", 1, "take 0 bytes, but 1 bytes follow"},
        Malformed{"overlap",
                  R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("y":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
                  7, "tensor \"y\": data_offsets [3, 7]: overlaps the tensor before, which ends at byte 4"},
        Malformed{"same place twice",
                  R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("y":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                  4, "overlaps"},
        Malformed{"nothing inside something",
                  R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("y":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
                  4, "overlaps"},
        Malformed{"hole between",
                  R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                  R"("y":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
                  3, "leaves a hole"},
        Malformed{"name made for a terminal", R"({"\u001b[2J":5})", 0, "\"\\x1b[2J\": must be an object"}));

TEST(Safetensors, RefusesABadLength) {
  EXPECT_NE(parse_error({}).find("0 bytes are too few"), std::string::npos);
  std::vector<std::byte> bytes = file_bytes("{}", 0);
  EXPECT_NE(parse_error(std::span(bytes).first(7)).find("7 bytes are too few"), std::string::npos);
  EXPECT_NE(parse_error(std::span(bytes).first(9)).find("header length 2, but only 1 bytes follow"), std::string::npos);
  bytes[7] = std::byte{0x80};
  EXPECT_NE(parse_error(bytes).find("9223372036854775810 is over the limit"), std::string::npos);
}

TEST(Safetensors, ReadsAHeaderOfUpTo100MillionBytes) {
  std::string header = "{}";
  header.resize(SafetensorsFile::kMaxHeaderBytes, ' ');
  EXPECT_EQ(parse_error(file_bytes(header, 0)), "accepted");
  header += ' ';
  EXPECT_NE(parse_error(file_bytes(header, 0)).find("100000001 is over the limit"), std::string::npos);
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  EXPECT_EQ(parse_error(file_bytes("{}", 0)), "accepted");
  EXPECT_EQ(parse_error(file_bytes(R"({"__metadata__":null})", 0)), "accepted");
  EXPECT_EQ(parse_error(file_bytes(R"({"__metadata__":{"k":""}}   )", 0)), "accepted");
  EXPECT_EQ(parse_error(file_bytes(tensor("\"F32\"", "[]", "[0,4]"), 4)), "accepted");
  EXPECT_EQ(parse_error(file_bytes(tensor("\"F4\"", "[4]", "[0,2]"), 2)), "accepted");
  EXPECT_EQ(parse_error(file_bytes(tensor("\"U8\"", "[0,7]", "[0,0]"), 0)), "accepted");
  // Tensors without bytes between and behind others, listed in any order.
  EXPECT_EQ(parse_error(file_bytes(R"({"c":{"dtype":"U8","shape":[0],"data_offsets":[4,4]},)"
                                   R"("b":{"dtype":"I8","shape":[2],"data_offsets":[2,4]},)"
                                   R"("z":{"dtype":"I64","shape":[3,0],"data_offsets":[2,2]},)"
                                   R"("a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})",
                                   4)),
            "accepted");
}

TEST(Safetensors, KnowsEveryDtype) {
  const std::vector<std::pair<const char*, int>> dtypes = {
      {"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},
      {"F8_E5M2", 8}, {"F8_E4M3", 8},     {"F8_E8M0", 8},     {"I16", 16},    {"U16", 16}, {"F16", 16},
      {"BF16", 16},   {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I32", 32},    {"U32", 32}, {"F32", 32},
      {"I64", 64},    {"U64", 64},        {"F64", 64},        {"C64", 64}};
  for (const auto& [name, bits] : dtypes) {
    const std::size_t bytes = static_cast<std::size_t>(bits);  // eight elements
    const std::string header = std::string(R"({"x":{"dtype":")") + name + R"(","shape":[2,4],"data_offsets":[0,)" +
                               std::to_string(bytes) + "]}}";
    const std::vector<std::byte> contents = file_bytes(header, bytes);
    const SafetensorsFile file = SafetensorsFile::parse(contents, "f");
    ASSERT_EQ(file.tensors().size(), 1u) << name;
    EXPECT_STREQ(dtype_name(file.tensors()[0].dtype), name);
    EXPECT_EQ(file.tensors()[0].data.size(), bytes) << name;
  }
}

// A directory of its own, removed at the end.
class SafetensorsOnDisk : public testing::Test {
 protected:
  SafetensorsOnDisk() {
    std::string name = (fs::temp_directory_path() / "chiasma-test-XXXXXX").string();
    directory_ = mkdtemp(name.data());
  }
  ~SafetensorsOnDisk() override { fs::remove_all(directory_); }

  std::string path(const char* name) const { return (directory_ / name).string(); }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }

  fs::path directory_;
};

TEST_F(SafetensorsOnDisk, RoundTrip) {
  std::vector<std::int32_t> numbers(15);
  std::iota(numbers.begin(), numbers.end(), -7);
  const std::array<std::byte, 3> odd{std::byte{1}, std::byte{2}, std::byte{3}};
  const SafetensorsMetadata metadata = {{"sm_scale", "0.1"}, {"quote\" \n", "\xc3\xa4"}};
  SafetensorsWriter writer;
  writer.set_metadata(metadata);
  writer.declare("odd", Dtype::kU8, {3});
  writer.declare("nothing", Dtype::kF64, {4, 0});
  writer.declare("a \"name\"", Dtype::kI32, {3, 5});
  writer.begin(path("file"));
  writer.write(odd);
  // Pieces need not follow the tensors' borders.
  writer.write(std::as_bytes(std::span(numbers)).first(17));
  writer.write(std::as_bytes(std::span(numbers)).subspan(17));
  EXPECT_FALSE(fs::exists(path("file"))) << "the file must not have its name before it is complete";
  writer.commit();

  const SafetensorsFile file = SafetensorsFile::open(path("file"));
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.find("no such tensor"), nullptr);
  const SafetensorsTensor* read = file.find("a \"name\"");
  ASSERT_NE(read, nullptr);
  EXPECT_EQ(describe(*read), "I32 [3, 5]");
  ASSERT_EQ(read->data.size(), numbers.size() * sizeof numbers[0]);
  EXPECT_EQ(std::memcmp(read->data.data(), numbers.data(), read->data.size()), 0);
  EXPECT_EQ(describe(*file.find("nothing")), "F64 [4, 0]");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.find("odd")->data.data()) % 64, 0u);
  EXPECT_EQ(files(), 1u);
}

TEST_F(SafetensorsOnDisk, AnUnfinishedFileLeavesTheOldOne) {
  std::ofstream(path("file")) << "old";
  {
    SafetensorsWriter writer;
    writer.declare("x", Dtype::kU8, {4});
    writer.begin(path("file"));
    EXPECT_EQ(files(), 2u);
    writer.write(std::array<std::byte, 3>{});
    EXPECT_THROW(writer.commit(), std::logic_error);
    EXPECT_THROW(writer.write(std::array<std::byte, 2>{}), std::logic_error);
  }
  EXPECT_EQ(files(), 1u);
  EXPECT_EQ(fs::file_size(path("file")), 3u);
}

TEST_F(SafetensorsOnDisk, TheDataOutlivesTheCopyThatOpenedIt) {
  SafetensorsWriter writer;
  writer.declare("x", Dtype::kU8, {1});
  writer.begin(path("file"));
  writer.write(std::array<std::byte, 1>{std::byte{42}});
  writer.commit();
  SafetensorsFile copy = [&] {
    const SafetensorsFile file = SafetensorsFile::open(path("file"));
    return file;
  }();
  fs::remove(path("file"));
  EXPECT_EQ(copy.find("x")->data[0], std::byte{42});
}

TEST_F(SafetensorsOnDisk, WritesThroughALinkAndRefusesDevices) {
  fs::create_symlink(path("target"), path("link"));
  SafetensorsWriter writer;
  writer.begin(path("link"));
  writer.commit();
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_TRUE(fs::is_regular_file(path("target")));
  SafetensorsWriter to_device, to_directory, to_nowhere;
  EXPECT_THROW(to_device.begin("/dev/null"), OutputError);
  EXPECT_THROW(to_directory.begin(directory_.string()), OutputError);
  EXPECT_THROW(to_nowhere.begin(path("missing/file")), OutputError);
}

TEST_F(SafetensorsOnDisk, OpenNamesTheFileAndTheReason) {
  const auto open_error = [](const std::string& name) {
    try {
      SafetensorsFile::open(name);
    } catch (const SafetensorsError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(open_error(path("missing")), path("missing") + ": cannot be read: No such file or directory");
  EXPECT_EQ(open_error(directory_.string()), directory_.string() + ": cannot be read: it is not a regular file");
  EXPECT_EQ(open_error("/dev/zero"), "/dev/zero: cannot be read: it is not a regular file");
  std::ofstream(path("empty")).close();
  EXPECT_EQ(open_error(path("empty")), path("empty") + ": 0 bytes are too few for a safetensors file");
}

TEST(SafetensorsWriter, RefusesWhatAReaderWould) {
  SafetensorsWriter overflow, twice, reserved;
  EXPECT_THROW(overflow.declare("x", Dtype::kF32, {std::int64_t{1} << 40, std::int64_t{1} << 40}), SafetensorsError);
  twice.declare("x", Dtype::kF32, {0});
  twice.declare("x", Dtype::kF32, {0});
  EXPECT_THROW(twice.begin("/nonexistent/file"), SafetensorsError);
  reserved.declare("__metadata__", Dtype::kF32, {0});
  EXPECT_THROW(reserved.begin("/nonexistent/file"), SafetensorsError);
}

}  // namespace
}  // namespace chiasma::cli
