// The compiled module: addresses and sizes in, nothing of torch. Tensors are checked in Python before their pointers come here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/anchored_tile.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "Compiled kernels of grpo_kernels; addresses are integers from Tensor.data_ptr().";

  m.def("supported_instruction_sets", [] {
    std::vector<std::string> names;
    for (const char* const* name = grpo::supported_instruction_sets(); *name; ++name) names.emplace_back(*name);
    return names;
  });

  m.def(
      "anchored_tile",
      [](uintptr_t tile, int64_t rows, int64_t cols, int64_t stride, int64_t first_row, float inverse_temperature,
         uintptr_t offset, uintptr_t targets, uintptr_t sum, uintptr_t weighted_sum, int threads,
         std::optional<std::string> instruction_set) {
        const grpo::AnchoredTile arguments{reinterpret_cast<float*>(tile),
                                           rows,
                                           cols,
                                           stride,
                                           first_row,
                                           inverse_temperature,
                                           reinterpret_cast<const float*>(offset),
                                           reinterpret_cast<const int64_t*>(targets),
                                           reinterpret_cast<double*>(sum),
                                           reinterpret_cast<double*>(weighted_sum)};
        py::gil_scoped_release release;
        if (grpo::anchored_tile(arguments, threads, instruction_set ? instruction_set->c_str() : nullptr))
          throw std::invalid_argument("instruction set not available on this machine: " + *instruction_set);
      },
      py::arg("tile"), py::arg("rows"), py::arg("cols"), py::arg("stride"), py::arg("first_row"),
      py::arg("inverse_temperature"), py::arg("offset"), py::arg("targets"), py::arg("sum"), py::arg("weighted_sum"),
      py::arg("threads"), py::arg("instruction_set") = py::none());
}
