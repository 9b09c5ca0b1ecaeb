// What somebody may have meant by a name that nobody reads.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace chiasma::cli {

// The candidate that `name` differs from by two letters at most, or that it is another usual word for; empty if none.
std::string meant_by(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace chiasma::cli
