// A paged KV pool filled with random rows: page placement, row values, NaN where nothing may be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "harness/case.h"

namespace chiasma::harness {

// Where the tokens of all requests lie. Pages are scattered by a random permutation; one spare page belongs to no
// request.
struct PoolLayout {
  std::int64_t requests, tokens_per_request, page;
  std::uint64_t key;
  std::int64_t page_stride_bytes;

  std::int64_t pages_per_request() const { return (tokens_per_request + page - 1) / page; }
  std::int64_t num_pages() const { return requests * pages_per_request() + 1; }
  std::int64_t num_slots() const { return num_pages() * page; }
  std::int64_t total_bytes() const { return num_pages() * page_stride_bytes; }
  // Physical page of the logical_page-th page, counted over all requests; the spare page comes last.
  std::int64_t physical_page(std::int64_t logical_page) const;
  std::int64_t slot(std::int64_t request, std::int64_t token) const;
  std::int64_t spare_slot() const { return physical_page(num_pages() - 1) * page; }
};

// Writes every byte of [pool, pool + total_bytes()). Slots of tokens get random rows of the case's format, distribution
// and scale mode; everything else, and with `selected` given also the slots it does not name, is 0xFF, which is NaN in
// every number format of a cache. False: *error says why the rows could not be quantised.
bool fill_pool(const Case& spec, const PoolLayout& layout, const std::vector<bool>* selected, std::byte* pool,
               std::string* error);

}  // namespace chiasma::harness
