// The compiled module: addresses and sizes in, nothing of torch. Tensors are checked in Python before their pointers come here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/anchored_tile.h"
#include "cpu/dispatch.h"
#include "cpu/logit_gradient.h"

namespace py = pybind11;

namespace {

template <typename T>
T* address(uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

template <typename Arguments>
void launch(int (*launcher)(const Arguments&, int, const char*), const Arguments& arguments, int threads,
            const std::optional<std::string>& instruction_set) {
  py::gil_scoped_release release;
  if (launcher(arguments, threads, instruction_set ? instruction_set->c_str() : nullptr))
    throw std::invalid_argument("instruction set not available on this machine: " + *instruction_set);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Compiled kernels of grpo_kernels; addresses are integers from Tensor.data_ptr().";

  m.def("supported_instruction_sets", [] {
    std::vector<std::string> names;
    for (const char* const* name = grpo::supported_instruction_sets(); *name; ++name) names.emplace_back(*name);
    return names;
  });

  m.def(
      "anchored_tile",
      [](uintptr_t tile, int64_t rows, int64_t cols, int64_t stride, int64_t first_row, uintptr_t bias, float softcap,
         bool keep_distances, uintptr_t inverse_temperature, uintptr_t offset, uintptr_t targets, uintptr_t sum,
         uintptr_t weighted_sum, int threads, const std::optional<std::string>& instruction_set) {
        const grpo::AnchoredTile arguments{address<float>(tile),
                                           rows,
                                           cols,
                                           stride,
                                           first_row,
                                           address<const float>(bias),
                                           softcap,
                                           keep_distances,
                                           address<const float>(inverse_temperature),
                                           address<const float>(offset),
                                           address<const int64_t>(targets),
                                           address<double>(sum),
                                           address<double>(weighted_sum)};
        launch(grpo::anchored_tile, arguments, threads, instruction_set);
      },
      py::kw_only(), py::arg("tile"), py::arg("rows"), py::arg("cols"), py::arg("stride"), py::arg("first_row"), py::arg("bias"),
      py::arg("softcap"), py::arg("keep_distances"), py::arg("inverse_temperature"), py::arg("offset"), py::arg("targets"),
      py::arg("sum"), py::arg("weighted_sum"), py::arg("threads"), py::arg("instruction_set"));

  m.def(
      "logit_gradient",
      [](uintptr_t tile, int64_t rows, int64_t cols, int64_t stride, float softcap, uintptr_t inverse_temperature,
         uintptr_t offset, uintptr_t log_total, uintptr_t slope, uintptr_t entropy_slope, int threads,
         const std::optional<std::string>& instruction_set) {
        const grpo::LogitGradient arguments{address<float>(tile),
                                            rows,
                                            cols,
                                            stride,
                                            softcap,
                                            address<const float>(inverse_temperature),
                                            address<const float>(offset),
                                            address<const float>(log_total),
                                            address<const float>(slope),
                                            address<const float>(entropy_slope)};
        launch(grpo::logit_gradient, arguments, threads, instruction_set);
      },
      py::kw_only(), py::arg("tile"), py::arg("rows"), py::arg("cols"), py::arg("stride"), py::arg("softcap"),
      py::arg("inverse_temperature"), py::arg("offset"), py::arg("log_total"), py::arg("slope"), py::arg("entropy_slope"),
      py::arg("threads"), py::arg("instruction_set"));
}
