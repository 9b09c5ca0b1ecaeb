#include "cli/safetensors.h"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>

#include "cli/safetensors_header.h"

namespace chiasma::cli {
namespace {

constexpr std::size_t kLengthBytes = 8;
// Headers are padded with spaces so that the data begins at a multiple of this.
constexpr std::size_t kDataAlignment = 64;

struct DtypeRow {
  Dtype dtype;
  const char* name;
  int bits;
};

// In the order of the enumeration.
constexpr std::array<DtypeRow, 22> kDtypes{{
    {Dtype::kBool, "BOOL", 8},
    {Dtype::kF4, "F4", 4},
    {Dtype::kF6E2M3, "F6_E2M3", 6},
    {Dtype::kF6E3M2, "F6_E3M2", 6},
    {Dtype::kU8, "U8", 8},
    {Dtype::kI8, "I8", 8},
    {Dtype::kF8E5M2, "F8_E5M2", 8},
    {Dtype::kF8E4M3, "F8_E4M3", 8},
    {Dtype::kF8E8M0, "F8_E8M0", 8},
    {Dtype::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8},
    {Dtype::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8},
    {Dtype::kI16, "I16", 16},
    {Dtype::kU16, "U16", 16},
    {Dtype::kF16, "F16", 16},
    {Dtype::kBF16, "BF16", 16},
    {Dtype::kI32, "I32", 32},
    {Dtype::kU32, "U32", 32},
    {Dtype::kF32, "F32", 32},
    {Dtype::kI64, "I64", 64},
    {Dtype::kU64, "U64", 64},
    {Dtype::kF64, "F64", 64},
    {Dtype::kC64, "C64", 64},
}};

constexpr bool rows_match_enumeration() {
  for (std::size_t row = 0; row < kDtypes.size(); ++row) {
    if (static_cast<std::size_t>(kDtypes[row].dtype) != row) return false;
  }
  return true;
}
static_assert(rows_match_enumeration());

std::uint64_t read_length(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  return length;
}

struct OtherKind {
  std::string_view beginning;
  const char* what;
};
constexpr OtherKind kOtherKinds[] = {
    {"version https://git-lfs", "a Git LFS pointer; `git lfs pull` fetches the file that it stands for"},
    {"<!DOCTYPE", "an HTML page, such as a server's message in place of the file"},
    {"<!doctype", "an HTML page, such as a server's message in place of the file"},
    {"<html", "an HTML page, such as a server's message in place of the file"},
    {"PK\x03\x04",
     "a zip archive, which torch.save() writes, too; safetensors.torch.save_file() writes what is wanted"},
    {"\x80\x02", "a Python pickle; safetensors.torch.save_file() writes what is wanted"},
    {"\x80\x04\x95", "a Python pickle; safetensors.torch.save_file() writes what is wanted"},
    {"\x80\x05\x95", "a Python pickle; safetensors.torch.save_file() writes what is wanted"},
    {"\x93NUMPY", "a NumPy array; safetensors.numpy.save_file() writes what is wanted"},
    {"\x1f\x8b", "compressed with gzip"},
    {"GGUF", "a GGUF file"},
};

// For files that are no safetensors files: which well-known kind they are, if any.
[[noreturn]] void fail_as_other_kind(const std::string& path, std::span<const std::byte> bytes, std::string otherwise) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const OtherKind& kind : kOtherKinds) {
    if (text.starts_with(kind.beginning)) {
      throw SafetensorsError(fmt::format("{}: not a safetensors file but {}", path, kind.what));
    }
  }
  throw SafetensorsError(fmt::format("{}: {}", path, otherwise));
}

}  // namespace

const char* dtype_name(Dtype dtype) {
  return kDtypes[static_cast<std::size_t>(dtype)].name;
}
int dtype_bits(Dtype dtype) {
  return kDtypes[static_cast<std::size_t>(dtype)].bits;
}

Dtype parse_dtype(std::string_view name, const std::string& where) {
  for (const DtypeRow& row : kDtypes) {
    if (name == row.name) return row.dtype;
  }
  throw SafetensorsError(fmt::format("{}: unknown dtype \"{}\"", where, printable(name)));
}

std::string describe(const SafetensorsTensor& tensor) {
  return fmt::format("{} {}", dtype_name(tensor.dtype), shape_text(tensor.shape));
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMaxShown = 160;
  std::string shown;
  for (const char character : text.substr(0, kMaxShown)) {
    const bool plain = character >= ' ' && character <= '~';
    shown += plain ? std::string(1, character) : fmt::format("\\x{:02x}", static_cast<unsigned char>(character));
  }
  return text.size() > kMaxShown ? shown + "..." : shown;
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  auto mapping = MappedFile::open(path);
  SafetensorsFile file = parse(mapping->bytes(), path);
  file.mapping_ = std::move(mapping);
  return file;
}

void SafetensorsFile::check_length() const {
  if (mapping_ != nullptr) mapping_->check_length();
}

void SafetensorsFile::release(std::span<const std::byte> part) const {
  if (mapping_ != nullptr) mapping_->release(part);
}

SafetensorsFile SafetensorsFile::parse(std::span<const std::byte> bytes, std::string path) {
  if (bytes.size() < kLengthBytes) {
    fail_as_other_kind(path, bytes, fmt::format("{} bytes are too few for a safetensors file", bytes.size()));
  }
  const std::uint64_t header_bytes = read_length(bytes);
  const std::span<const std::byte> rest = bytes.subspan(kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    fail_as_other_kind(path, bytes,
                       fmt::format("header length {} is over the limit of {} bytes; is this a safetensors file?",
                                   header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > rest.size()) {
    fail_as_other_kind(path, bytes,
                       fmt::format("header length {}, but only {} bytes follow; the file is cut short, {} bytes of the "
                                   "header are missing",
                                   header_bytes, rest.size(), header_bytes - rest.size()));
  }
  const auto header_size = static_cast<std::size_t>(header_bytes);
  const std::string_view json(reinterpret_cast<const char*>(rest.data()), header_size);
  const std::span<const std::byte> data = rest.subspan(header_size);

  SafetensorsFile file;
  SafetensorsHeader header = read_safetensors_header(json, data.size(), path);
  file.path_ = std::move(path);
  file.begin_ = bytes.data();
  file.data_offset_ = kLengthBytes + header_bytes;
  file.metadata_ = std::move(header.metadata);
  for (HeaderTensor& tensor : header.tensors) {
    const auto begin = static_cast<std::size_t>(tensor.begin);
    const auto size = static_cast<std::size_t>(tensor.end - tensor.begin);
    file.by_name_.emplace(tensor.name, file.tensors_.size());
    file.tensors_.push_back({std::move(tensor.name), tensor.dtype, std::move(tensor.shape), data.subspan(begin, size)});
  }
  return file;
}

const SafetensorsTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

void SafetensorsWriter::declare(std::string name, Dtype dtype, std::vector<std::int64_t> shape) {
  const std::uint64_t bytes = tensor_bytes(dtype, shape, "tensor \"" + printable(name) + "\"");
  tensors_.push_back({std::move(name), dtype, std::move(shape), bytes});
}

std::string SafetensorsWriter::header() const {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata_.empty()) json[kMetadataKey] = metadata_;
  std::uint64_t begin = 0;
  for (const Declared& tensor : tensors_) {
    if (json.contains(tensor.name) || tensor.name == kMetadataKey) {
      throw SafetensorsError(fmt::format("tensor \"{}\": the name is taken", printable(tensor.name)));
    }
    json[tensor.name] = {
        {"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {begin, begin + tensor.bytes}}};
    begin += tensor.bytes;
  }
  std::string text = json.dump();
  text.append((kDataAlignment - (kLengthBytes + text.size()) % kDataAlignment) % kDataAlignment, ' ');
  return text;
}

void SafetensorsWriter::begin(const std::string& path) {
  const std::string text = header();
  file_.emplace(path);
  std::array<std::byte, kLengthBytes> length{};
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length[i] = static_cast<std::byte>(std::uint64_t{text.size()} >> 8 * i);
  file_->write(length);
  file_->write(std::as_bytes(std::span(text)));
  bytes_left_ = 0;
  for (const Declared& tensor : tensors_) bytes_left_ += tensor.bytes;
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() > bytes_left_) throw std::logic_error("more bytes than the declared tensors take");
  file_->write(bytes);
  bytes_left_ -= bytes.size();
}

void SafetensorsWriter::commit() {
  if (bytes_left_ != 0) throw std::logic_error("fewer bytes than the declared tensors take");
  file_->commit();
}

}  // namespace chiasma::cli
