// merge.
#include "arguments.h"
#include "boundary.h"

namespace chiasma::python {
namespace {

// part_out, part_lse, out, lse, plus_infinity_is_empty, stream, checked. A rank of 4 instead of 5 is a call without
// s_q.
Result merge(Arguments arguments) {
  const Argument part_out{"part_out", &arguments[0]};
  const bool is_reduced = as_dltensor(part_out)->ndim == 4;
  const auto tensor = [&](const char* name, std::size_t position, unsigned accepts, int rank, int unit_dim) {
    const Argument argument{name, &arguments[position]};
    const DLTensor& given = *as_dltensor(argument);
    if (is_reduced && given.ndim != rank - 1) {
      fail(FailureKind::value, name, " has shape ", shape_text(given), ", rank ", given.ndim,
           "; with a part_out of rank 4, [parts, T, h_q, 512], it must have rank ", rank - 1);
    }
    return as_tensor(argument, accepts, is_reduced ? unit_dim : -1);
  };
  chiasma_merge_args args{};
  args.part_out = tensor("part_out", 0, kBfloat16 | kFloat32, 5, 2);
  args.part_lse = tensor("part_lse", 1, kFloat32, 4, 2);
  args.out = tensor("out", 2, kBfloat16 | kFloat32, 4, 1);
  args.lse = tensor("lse", 3, kFloat32, 3, 1);
  args.plus_infinity_is_empty = as_bool({"plus_infinity_is_empty", &arguments[4]}) ? 1 : 0;
  check(chiasma_merge(&args, as_stream({"stream", &arguments[5]}, args.part_out.device)));
  return nullptr;
}

}  // namespace

CHIASMA_PYTHON_EXPORT(merge, merge, 7)

}  // namespace chiasma::python
