#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "hidden_layer.hpp"

namespace py = pybind11;
using namespace dslide;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

// The number of rows of a matrix [rows, width].
std::size_t rows_of(const Array<float>& x, std::int64_t width, const char* name) {
  if (x.ndim() != 2 || x.shape(1) != width)
    throw py::value_error(std::string(name) + ": expected a matrix of " + std::to_string(width) + " columns");
  return static_cast<std::size_t>(x.shape(0));
}

void want_rows(std::size_t rows, std::size_t expected, const char* name) {
  if (rows != expected) throw py::value_error(std::string(name) + ": expected " + std::to_string(expected) + " rows");
}

template <class T>
Array<T> copied(const std::vector<T>& values) {
  return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// The last forward's active units of the shard: None for all, (None, units) for the same of all points, else
// (indptr, units) by point.
py::object active_units(const HiddenLayer& layer) {
  if (layer.active().all) return py::none();
  if (layer.active().shared) return py::make_tuple(py::none(), copied(layer.active().rows));
  return py::make_tuple(copied(layer.point_indptr()), copied(layer.point_units()));
}

}  // namespace

void bind_hidden(py::module_& m) {
  py::class_<HiddenLayer>(m, "HiddenLayer")
      .def(py::init([](OutputLayer& rows, float slope, float dropout, float scale, std::uint64_t seed) {
        return std::make_unique<HiddenLayer>(rows, HiddenConfig{slope, dropout, scale, seed});
      }), py::arg("rows"), py::kw_only(), py::arg("slope") = 0.0f, py::arg("dropout") = 0.0f, py::arg("scale") = 1.0f,
          py::arg("seed") = 0, py::keep_alive<1, 2>())
      .def("predict", [](const HiddenLayer& layer, const Array<float>& in, Array<float>& out) {
        const std::size_t points = rows_of(in, layer.inputs(), "in");
        want_rows(rows_of(out, layer.width(), "out"), points, "out");
        const float* from = in.data();
        float* to = out.mutable_data();
        py::gil_scoped_release release;
        layer.predict(from, points, to);
      }, py::arg("in").noconvert(), py::arg("out").noconvert(), "out float32 [n, width] from in float32 [n, inputs], all units.")
      .def("forward", [](HiddenLayer& layer, const Batch& batch, const Array<float>& in, Sampler* sampler, Array<float>& out) {
        want_rows(rows_of(in, layer.inputs(), "in"), batch.size(), "in");
        want_rows(rows_of(out, layer.width(), "out"), batch.size(), "out");
        const float* from = in.data();
        float* to = out.mutable_data();
        py::gil_scoped_release release;
        layer.forward(batch, from, sampler, to);
      }, py::arg("batch"), py::arg("in").noconvert(), py::arg("sampler").none(true), py::arg("out").noconvert(),
           "In training; a batch without labels. `in` must stay unchanged until update().")
      .def("backward", [](HiddenLayer& layer, const Array<float>& dout, Array<float>& din) {
        want_rows(rows_of(din, layer.inputs(), "din"), rows_of(dout, layer.width(), "dout"), "din");
        want_rows(rows_of(dout, layer.width(), "dout"), layer.points(), "dout");
        const float* from = dout.data();
        float* to = din.mutable_data();
        py::gil_scoped_release release;
        layer.backward(from, to);
      }, py::arg("dout").noconvert(), py::arg("din").noconvert())
      .def("update", &HiddenLayer::update, py::arg("lr"), py::arg("step"), py::call_guard<py::gil_scoped_release>())
      .def("active_units", &active_units,
           "Of the last forward: None for all of the shard; (None, units int32) for the same of all points; (indptr int64 "
           "[n + 1], units int32) by point.")
      .def_property_readonly("active_pairs", &HiddenLayer::active_pairs);
}
