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
  EXPECT_EQ(v4::kRopeOffset, 448);
  EXPECT_EQ(v4::kTileDim, 64);
  EXPECT_EQ(v4::kNumTiles, 7);
  EXPECT_EQ(key_dim(KvFormat::v4), 512);
  EXPECT_EQ(row_stride_bytes(KvFormat::v4), 576);
  EXPECT_EQ(token_extent(KvFormat::v4), 584);
  EXPECT_EQ(v4::scales_offset(64, 0), 64 * 576);
  EXPECT_EQ(v4::scales_offset(64, 63), 64 * 576 + 63 * 8);
  EXPECT_EQ(min_page_bytes(KvFormat::v4, 64), 64 * 584);
}

TEST(Layout, V4PagesArePaddedTo576) {
  EXPECT_EQ(v4::padded_page_bytes(64), 37440);  // 65 * 576, of which 64 * 584 = 37376 are used
  EXPECT_EQ(v4::padded_page_bytes(1), 1152);
  EXPECT_EQ(v4::padded_page_bytes(72), 72 * 584);  // a multiple already
  for (int page = 1; page <= 300; ++page) {
    EXPECT_EQ(v4::padded_page_bytes(page) % 576, 0);
    EXPECT_GE(v4::padded_page_bytes(page), min_page_bytes(KvFormat::v4, page));
    EXPECT_LT(v4::padded_page_bytes(page), min_page_bytes(KvFormat::v4, page) + 576);
  }
}

TEST(Layout, Bf16) {
  EXPECT_EQ(key_dim(KvFormat::bf16), 576);
  EXPECT_EQ(row_stride_bytes(KvFormat::bf16), 1152);
  EXPECT_EQ(token_extent(KvFormat::bf16), 576);
}

// Offsets that kernels read 16 bytes at a time, or as float32, stay aligned in every row of every page.
TEST(Layout, Alignment) {
  for (const KvFormat format : {KvFormat::v32, KvFormat::v4, KvFormat::bf16}) {
    EXPECT_EQ(row_stride_bytes(format) % kCacheAlignment, 0) << format_name(format);
  }
  EXPECT_EQ(v32::kScalesOffset % 16, 0);
  EXPECT_EQ(v32::kRopeOffset % 16, 0);
  EXPECT_EQ(v4::kRopeOffset % 16, 0);
  EXPECT_EQ(v4::scales_offset(61, 60) % 8, 0);
}

TEST(Layout, Names) {
  EXPECT_STREQ(format_name(KvFormat::v32), "v32");
  EXPECT_STREQ(format_name(KvFormat::v4), "v4");
  EXPECT_STREQ(format_name(KvFormat::bf16), "bf16");
}

}  // namespace
}  // namespace chiasma
