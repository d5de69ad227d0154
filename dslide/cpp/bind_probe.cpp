// What `dslide bench` times apart from the layers: rows of a table, hashing, table building, a sampler's look-up.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "hashing.hpp"
#include "probe.hpp"
#include "tables.hpp"

namespace py = pybind11;
using namespace dslide;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Ids = Array<std::int32_t>;

// A hash family and its tables over the rows of a matrix, each step by itself.
class HashProbe {
 public:
  HashProbe(Pool& pool, std::int64_t dim, const std::string& family, int k, int l, const std::string& packing)
      : pool_(pool), dim_(dim), l_(l) {
    HashConfig config;
    config.family = hash_family_from_name(family);
    config.k = k;
    config.l = l;
    config.published_packing = packing == "published";
    family_ = make_hash_family(dim, config, 0);
  }
  void hash(const Array<float>& x) {
    if (x.ndim() != 2 || x.shape(1) != dim_) throw py::value_error("hash: x must have as many columns as `dim`");
    count_ = static_cast<std::size_t>(x.shape(0));
    codes_.resize(count_ * static_cast<std::size_t>(l_));
    const float* rows = x.data();
    py::gil_scoped_release release;
    family_->hash(pool_, rows, count_, codes_.data(), count_);
  }
  void build() {
    py::gil_scoped_release release;
    tables_.build(pool_, codes_.data(), count_, l_, family_->buckets(), 128, HashTables::Policy::kFifo, 0, 0);
  }

 private:
  Pool& pool_;
  std::int64_t dim_;
  int l_;
  std::size_t count_ = 0;
  std::unique_ptr<HashFamily> family_;
  std::vector<std::uint32_t> codes_;
  HashTables tables_;
};

}  // namespace

void bind_probe(py::module_& m) {
  py::class_<RowProbe>(m, "RowProbe", "A float32 table [rows, width] of which rows are touched, to time it.")
      .def(py::init<Pool&, std::int64_t, std::int64_t>(), py::arg("pool"), py::arg("rows"), py::arg("width"),
           py::keep_alive<1, 2>(), py::call_guard<py::gil_scoped_release>())
      .def("update", [](RowProbe& probe, const Ids& ids) {
        const std::int32_t* data = ids.data();
        const auto count = static_cast<std::size_t>(ids.size());
        py::gil_scoped_release release;
        probe.update(data, count);
      }, py::arg("ids").noconvert(), "No id may occur twice.")
      .def("gather", [](RowProbe& probe, const Ids& ids, std::size_t group) {
        const std::int32_t* data = ids.data();
        const auto count = static_cast<std::size_t>(ids.size());
        py::gil_scoped_release release;
        probe.gather(data, count, group);
      }, py::arg("ids").noconvert(), py::arg("group"));

  m.def("pass_to_and_fro", &pass_to_and_fro, py::arg("pool"), py::arg("count"), py::call_guard<py::gil_scoped_release>(),
        "A number goes from one thread of the pool to another and back, `count` times.");

  py::class_<ProductProbe>(m, "ProductProbe", "The three products of an output layer with all rows, each by itself.")
      .def(py::init<Pool&, std::int64_t, std::int64_t, std::int64_t, bool>(), py::arg("pool"), py::arg("rows"),
           py::arg("hidden"), py::arg("points"), py::kw_only(), py::arg("half") = false, py::keep_alive<1, 2>(),
           py::call_guard<py::gil_scoped_release>())
      .def("logits", &ProductProbe::logits, py::call_guard<py::gil_scoped_release>())
      .def("hidden_gradient", &ProductProbe::hidden_gradient, py::call_guard<py::gil_scoped_release>())
      .def("weight_gradient", &ProductProbe::weight_gradient, py::call_guard<py::gil_scoped_release>());

  py::class_<HashProbe>(m, "HashProbe", "Hashing and table building, each by itself.")
      .def(py::init<Pool&, std::int64_t, const std::string&, int, int, const std::string&>(), py::arg("pool"),
           py::arg("dim"), py::kw_only(), py::arg("family"), py::arg("k"), py::arg("l"), py::arg("packing") = "exact",
           py::keep_alive<1, 2>())
      .def("hash", &HashProbe::hash, py::arg("x").noconvert(), "Buckets of the rows of x, float32 [rows, dim].")
      .def("build", &HashProbe::build, "Tables of the rows that were hashed last.");

  m.def("select", [](Sampler& sampler, const Batch& batch, const Array<float>& h) {
    if (h.ndim() != 2 || h.shape(0) != static_cast<py::ssize_t>(batch.size())) throw py::value_error("select: h [batch, hidden]");
    const float* data = h.data();
    py::gil_scoped_release release;
    ActiveSet active;
    sampler.select(batch, data, active);
    return active.row_count;
  }, py::arg("sampler"), py::arg("batch"), py::arg("h").noconvert(), "A sampler's look-up alone; the number of active rows.");
}
