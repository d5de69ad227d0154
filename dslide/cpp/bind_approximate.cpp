#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "approximate.hpp"

namespace py = pybind11;
using namespace dslide;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

}  // namespace

void bind_approximate(py::module_& m) {
  py::class_<ApproximateTopK>(m, "ApproximateTopK")
      .def(py::init([](OutputLayer& layer, const std::string& family, int k, int l, std::int64_t candidates, std::uint64_t seed) {
        ApproximateTopK::Config config;
        config.hash.family = hash_family_from_name(family);
        config.hash.k = k;
        config.hash.l = l;
        config.hash.dense_projections = true;
        config.candidates = candidates;
        config.seed = seed;
        py::gil_scoped_release release;
        return std::make_unique<ApproximateTopK>(layer, config);
      }), py::arg("layer"), py::kw_only(), py::arg("family"), py::arg("k"), py::arg("l"), py::arg("candidates"),
          py::arg("seed") = 0, py::keep_alive<1, 2>())
      .def("topk", [](const ApproximateTopK& index, const Array<float>& h, int k, Array<std::int32_t>& ids, Array<float>& scores,
                       std::optional<Array<double>> lse) {
        if (h.ndim() != 2 || h.shape(1) != index.layer().config().hidden) throw py::value_error("h: expected a matrix of hidden activations");
        if (k < 1 || ids.ndim() != 2 || ids.shape(0) != h.shape(0) || ids.shape(1) != k || scores.ndim() != 2 ||
            scores.shape(0) != h.shape(0) || scores.shape(1) != k)
          throw py::value_error("ids and scores: expected shape (" + std::to_string(h.shape(0)) + ", " + std::to_string(k) + ")");
        if (lse && (lse->ndim() != 1 || lse->size() != h.shape(0))) throw py::value_error("lse: expected one number a point");
        const float* from = h.data();
        std::int32_t* to = ids.mutable_data();
        float* score = scores.mutable_data();
        double* sums = lse ? lse->mutable_data() : nullptr;
        const auto points = static_cast<std::size_t>(h.shape(0));
        py::gil_scoped_release release;
        index.topk(from, points, k, to, score, sums);
      }, py::arg("h").noconvert(), py::arg("k"), py::arg("ids").noconvert(), py::arg("scores").noconvert(),
         py::arg("lse").noconvert() = py::none(), "As OutputLayer.topk among the candidates.");
}
