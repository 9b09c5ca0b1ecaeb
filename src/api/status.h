// Success or failure with a message. Internal functions return one; the C interface turns it into a code and keeps the
// message for the calling thread.
#pragma once

#include <sstream>
#include <string>
#include <utility>

#include "chiasma/chiasma.h"

namespace chiasma {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(chiasma_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == CHIASMA_OK; }
  chiasma_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  chiasma_status code_ = CHIASMA_OK;
  std::string message_;
};

// Joins anything printable: concat("topk is ", 3).
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
Status invalid_argument(const Parts&... parts) {
  return {CHIASMA_INVALID_ARGUMENT, concat(parts...)};
}

template <typename... Parts>
Status unsupported(const Parts&... parts) {
  return {CHIASMA_UNSUPPORTED, concat(parts...)};
}

}  // namespace chiasma

#define CHIASMA_RETURN_IF_ERROR(expression)                                      \
  do {                                                                           \
    if (::chiasma::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)
