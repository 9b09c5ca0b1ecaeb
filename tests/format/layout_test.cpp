// The byte layouts, restated here as plain numbers: a change of kv_format.h that readers of existing caches would
// notice fails.
#include <gtest/gtest.h>

#include "format/kv_format.h"

namespace chiasma {
namespace {

TEST(Layout, V32) {
  EXPECT_EQ(v32::kCodesOffset, 0);
  EXPECT_EQ(v32::kScalesOffset, 512);
  EXPECT_EQ(v32::kRopeOffset, 528);
  EXPECT_EQ(v32::kTileDim, 128);
  EXPECT_EQ(v32::kNumTiles, 4);
  EXPECT_EQ(key_dim(KvFormat::v32), 576);
  EXPECT_EQ(row_stride_bytes(KvFormat::v32), 656);
  EXPECT_EQ(token_extent(KvFormat::v32), 656);
  EXPECT_EQ(min_page_bytes(KvFormat::v32, 64), 64 * 656);
}

TEST(Layout, V4) {
  constexpr RowTraits kV4 = traits_of(KvFormat::v4);
  EXPECT_EQ(kV4.bf16_offset, 448);
  EXPECT_EQ(kV4.scale_columns, 64);
  EXPECT_EQ(kV4.num_scales(), 7);
  EXPECT_EQ(key_dim(KvFormat::v4), 512);
  EXPECT_EQ(row_stride_bytes(KvFormat::v4), 576);
  EXPECT_EQ(token_extent(KvFormat::v4), 584);
  EXPECT_EQ(plane_offset(KvFormat::v4, 64, 0), 64 * 576);
  EXPECT_EQ(plane_offset(KvFormat::v4, 64, 63), 64 * 576 + 63 * 8);
  EXPECT_EQ(min_page_bytes(KvFormat::v4, 64), 64 * 584);
}

TEST(Layout, V4PagesArePaddedTo576) {
  EXPECT_EQ(padded_page_bytes(KvFormat::v4, 64), 37440);  // 65 * 576, of which 64 * 584 = 37376 are used
  EXPECT_EQ(padded_page_bytes(KvFormat::v4, 1), 1152);
  EXPECT_EQ(padded_page_bytes(KvFormat::v4, 72), 72 * 584);  // a multiple already
  for (int page = 1; page <= 300; ++page) {
    EXPECT_EQ(padded_page_bytes(KvFormat::v4, page) % 576, 0);
    EXPECT_GE(padded_page_bytes(KvFormat::v4, page), min_page_bytes(KvFormat::v4, page));
    EXPECT_LT(padded_page_bytes(KvFormat::v4, page), min_page_bytes(KvFormat::v4, page) + 576);
  }
}

TEST(Layout, V41) {
  constexpr RowTraits kRows = traits_of(KvFormat::v41);
  EXPECT_EQ(kRows.code_columns, 512);
  EXPECT_EQ(kRows.num_scales(), 16);
  EXPECT_EQ(kRows.scales_offset, 512);
  EXPECT_EQ(kRows.row_bytes, 528);
  EXPECT_EQ(token_extent(KvFormat::v41), 528);
  EXPECT_EQ(key_dim(KvFormat::v41), 512);
  EXPECT_EQ(padded_page_bytes(KvFormat::v41, 61), 61 * 528);
  constexpr RowTraits kPlane = traits_of(KvFormat::v41plane);
  EXPECT_EQ(kPlane.row_bytes, 512);
  EXPECT_EQ(token_extent(KvFormat::v41plane), 528);
  EXPECT_EQ(plane_offset(KvFormat::v41plane, 61, 2), 61 * 512 + 2 * 16);
  EXPECT_EQ(padded_page_bytes(KvFormat::v41plane, 61), 63 * 512);  // 61 * 528 = 32208
}

TEST(Layout, RowsWithoutRotaryColumns) {
  EXPECT_EQ(token_extent(KvFormat::v32nope), 656);
  EXPECT_EQ(token_extent(KvFormat::v32nope_compact), 528);
  for (const KvFormat format : {KvFormat::v32nope, KvFormat::v32nope_compact}) {
    EXPECT_EQ(key_dim(format), 512);
    EXPECT_EQ(traits_of(format).scales_offset, 512);
    EXPECT_EQ(traits_of(format).num_scales(), 4);
    EXPECT_EQ(traits_of(format).bf16_columns, 0);
  }
}

TEST(Layout, OneScaleForTheCache) {
  EXPECT_EQ(token_extent(KvFormat::fp8), 576);
  EXPECT_EQ(key_dim(KvFormat::fp8), 576);
  EXPECT_EQ(token_extent(KvFormat::fp8nope), 512);
  EXPECT_EQ(key_dim(KvFormat::fp8nope), 512);
}

TEST(Layout, Bf16) {
  EXPECT_EQ(key_dim(KvFormat::bf16), 576);
  EXPECT_EQ(row_stride_bytes(KvFormat::bf16), 1152);
  EXPECT_EQ(token_extent(KvFormat::bf16), 576);
  EXPECT_EQ(key_dim(KvFormat::bf16nope), 512);
  EXPECT_EQ(row_stride_bytes(KvFormat::bf16nope), 1024);
}

// Offsets that kernels read 16 bytes at a time, or as float32, stay aligned in every row of every page.
TEST(Layout, Alignment) {
  for (const KvFormat format : kAllFormats) {
    EXPECT_EQ(row_stride_bytes(format) % kCacheAlignment, 0) << format_name(format);
  }
  EXPECT_EQ(v32::kScalesOffset % 16, 0);
  EXPECT_EQ(v32::kRopeOffset % 16, 0);
  EXPECT_EQ(traits_of(KvFormat::v4).bf16_offset % 16, 0);
  EXPECT_EQ(plane_offset(KvFormat::v4, 61, 60) % 8, 0);
}

TEST(Layout, Names) {
  EXPECT_STREQ(format_name(KvFormat::v32), "v32");
  EXPECT_STREQ(format_name(KvFormat::v4), "v4");
  EXPECT_STREQ(format_name(KvFormat::bf16), "bf16");
}

}  // namespace
}  // namespace chiasma
