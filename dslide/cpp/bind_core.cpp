#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>

#include "batch.hpp"
#include "input_layer.hpp"
#include "kernels.hpp"
#include "output_layer.hpp"
#include "pool.hpp"
#include "samplers.hpp"
#include "tables.hpp"
#include "wire.hpp"

namespace py = pybind11;
using namespace dslide;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Arrays are taken as they are: exact dtype, C order, never copied.
template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
void want(const Array<T>& array, std::initializer_list<py::ssize_t> shape, const char* name) {
  bool good = array.ndim() == static_cast<py::ssize_t>(shape.size());
  py::ssize_t axis = 0;
  for (const py::ssize_t size : shape) good = good && array.shape(axis++) == size;
  if (good) return;
  std::string text = std::string(name) + ": expected shape (";
  for (const py::ssize_t size : shape) text += std::to_string(size) + ", ";
  throw py::value_error(text + ")");
}

struct CsrHolder {
  Array<std::int64_t> indptr;
  Array<std::int32_t> indices;
  py::object values;
  Csr csr;
};

std::shared_ptr<CsrHolder> make_csr(Array<std::int64_t> indptr, Array<std::int32_t> indices, py::object values,
                                    std::int64_t columns) {
  auto holder = std::make_shared<CsrHolder>();
  if (indptr.ndim() != 1 || indptr.size() < 1 || indices.ndim() != 1) throw py::value_error("Csr: indptr and indices must be vectors");
  holder->csr.indptr = indptr.data();
  holder->csr.indices = indices.data();
  holder->csr.rows = indptr.size() - 1;
  holder->csr.columns = columns;
  if (!values.is_none()) {
    if (!py::isinstance<Array<float>>(values)) throw py::type_error("Csr: values must be a float32 vector");
    const auto array = py::cast<Array<float>>(values);
    want(array, {indices.size()}, "Csr values");
    holder->csr.values = array.data();
    holder->values = array;
  }
  holder->csr.check(indices.size(), "Csr");
  holder->indptr = std::move(indptr);
  holder->indices = std::move(indices);
  return holder;
}

// A writable view of a buffer that lives as long as its owner.
py::array view(Buffer<float>& buffer, std::vector<py::ssize_t> shape, py::handle owner) {
  return py::array_t<float>(std::move(shape), buffer.data(), owner);
}

// float32, or the bits of bfloat16 as uint16.
py::array view(WeightTable& weights, std::vector<py::ssize_t> shape, py::handle owner) {
  if (weights.half()) return py::array_t<std::uint16_t>(std::move(shape), weights.halves().data(), owner);
  return view(weights.floats(), std::move(shape), owner);
}

py::dict state_views(RowState& state, std::int64_t rows, std::int64_t width, py::handle owner) {
  py::dict views;
  if (state.half()) {  // the bits of bfloat16
    views["m"] = py::array_t<std::uint16_t>({rows, width}, state.half_m().data(), owner);
    views["v"] = py::array_t<std::uint16_t>({rows, width}, state.half_v().data(), owner);
  } else if (state.optimizer().moments()) {
    views["m"] = view(state.m(), {rows, width}, owner);
    views["v"] = view(state.v(), {rows, width}, owner);
  } else {
    views["accum"] = view(state.accum(), {rows, state.blocks()}, owner);
  }
  return views;
}

Optimizer make_optimizer(const std::string& kind, float eps, float beta1, float beta2, float initial_accumulator) {
  Optimizer optimizer;
  if (kind == "adagrad") optimizer.kind = Optimizer::Kind::kAdagrad;
  else if (kind == "adam") optimizer.kind = Optimizer::Kind::kAdam;
  else if (kind == "adam-catch-up") optimizer.kind = Optimizer::Kind::kAdamCatchUp;
  else throw py::value_error("unknown optimizer '" + kind + "'; choose adagrad, adam or adam-catch-up");
  optimizer.eps = eps;
  optimizer.beta1 = beta1;
  optimizer.beta2 = beta2;
  optimizer.initial_accumulator = initial_accumulator;
  return optimizer;
}

InputConfig make_input_config(std::int64_t features, std::int64_t hidden_total, std::int64_t hidden_begin,
                              std::int64_t hidden_end, const std::string& activation, float slope, float dropout,
                              float init_std, bool bias, std::uint64_t seed, std::int64_t state_block, bool half) {
  InputConfig config;
  config.features = features;
  config.hidden_total = hidden_total;
  config.hidden_begin = hidden_begin;
  config.hidden_end = hidden_end;
  if (activation == "relu") config.slope = 0.0f;
  else if (activation == "leaky-relu") config.slope = slope;
  else throw py::value_error("unknown activation '" + activation + "'; choose relu or leaky-relu");
  config.dropout = dropout;
  config.init_std = init_std;
  config.bias = bias;
  config.seed = seed;
  config.state_block = state_block;
  config.half = half;
  return config;
}

// The end of a part of a batch's points that begins at `first`; no `last`: the batch's.
std::size_t part_end(const Batch& batch, std::size_t first, std::optional<std::size_t> last) {
  const std::size_t end = last.value_or(batch.size());
  if (first > end || end > batch.size()) throw py::value_error("first and last: not a part of the batch");
  return end;
}

void bind_layers(py::module_& m) {
  py::class_<Optimizer>(m, "Optimizer")
      .def(py::init(&make_optimizer), py::arg("kind"), py::kw_only(), py::arg("eps") = 1e-8f, py::arg("beta1") = 0.9f,
           py::arg("beta2") = 0.999f, py::arg("initial_accumulator") = 0.0f);

  py::class_<InputConfig>(m, "InputConfig")
      .def(py::init(&make_input_config), py::arg("features"), py::arg("hidden_total"), py::arg("hidden_begin"),
           py::arg("hidden_end"), py::kw_only(), py::arg("activation") = "relu", py::arg("slope") = 0.0f,
           py::arg("dropout") = 0.0f, py::arg("init_std") = 0.05f, py::arg("bias") = false, py::arg("seed") = 0,
           py::arg("state_block") = 16, py::arg("half") = false);

  py::class_<InputLayer>(m, "InputLayer")
      .def(py::init<Pool&, const InputConfig&>(), py::arg("pool"), py::arg("config"), py::keep_alive<1, 2>(), NoGil())
      .def("set_optimizer", &InputLayer::set_optimizer, py::arg("optimizer"))
      .def_property_readonly("width", &InputLayer::width)
      .def_property_readonly("weights", [](py::object self) {
        auto& layer = self.cast<InputLayer&>();
        return view(layer.weights(), {layer.config().features, layer.width()}, self);
      }, "float32 [features, width], a view; with `half` the bits of bfloat16, uint16")
      .def_property_readonly("bias", [](py::object self) {
        auto& layer = self.cast<InputLayer&>();
        return view(layer.bias(), {static_cast<py::ssize_t>(layer.bias().size())}, self);
      })
      .def("state", [](py::object self) {
        auto& layer = self.cast<InputLayer&>();
        return state_views(layer.state(), layer.config().features, layer.width(), self);
      })
      .def("bias_state", [](py::object self) {
        auto& layer = self.cast<InputLayer&>();
        return state_views(layer.bias_state(), layer.config().bias ? 1 : 0, layer.width(), self);
      })
      .def("forward", [](InputLayer& layer, const Batch& batch, Array<float>& out, bool train, std::size_t first,
                         std::optional<std::size_t> last, bool second) {
        want(out, {static_cast<py::ssize_t>(batch.size()), layer.width()}, "out");
        const std::size_t end = part_end(batch, first, last);
        float* data = out.mutable_data();
        py::gil_scoped_release release;
        layer.forward(batch, data, train, first, end, second ? 1 : 0);
      }, py::arg("batch"), py::arg("out").noconvert(), py::arg("train"), py::arg("first") = 0, py::arg("last") = py::none(),
           py::arg("second") = false,
           "Of the points [first, last), by default of all. `second`: of two batches that are between forward and backward")
      .def("backward", [](InputLayer& layer, const Batch& batch, Array<float>& dh, float lr, std::uint64_t step,
                          std::size_t first, std::optional<std::size_t> last, bool second) {
        want(dh, {static_cast<py::ssize_t>(batch.size()), layer.width()}, "dh");
        const std::size_t end = part_end(batch, first, last);
        float* data = dh.mutable_data();
        py::gil_scoped_release release;
        layer.backward(batch, data, lr, step, first, end, second ? 1 : 0);
      }, py::arg("batch"), py::arg("dh").noconvert(), py::arg("lr"), py::arg("step"), py::arg("first") = 0,
           py::arg("last") = py::none(), py::arg("second") = false,
           "Of the points [first, last), by default of all; parts in order, the last of which completes the step")
      .def("settle", &InputLayer::settle, NoGil(), "Brings rows that wait for missed steps up to date");

  py::class_<OutputLayer>(m, "OutputLayer")
      .def(py::init([](Pool& pool, std::int64_t labels_total, std::int64_t label_begin, std::int64_t label_end,
                       std::int64_t hidden, bool bias, float init_std, std::uint64_t seed, bool half) {
        OutputConfig config;
        config.half = half;
        config.shard = {labels_total, label_begin, label_end};
        config.hidden = hidden;
        config.bias = bias;
        config.init_std = init_std;
        config.seed = seed;
        return std::make_unique<OutputLayer>(pool, config);
      }), py::arg("pool"), py::arg("labels_total"), py::arg("label_begin"), py::arg("label_end"), py::arg("hidden"),
          py::kw_only(), py::arg("bias") = false, py::arg("init_std") = 0.01f, py::arg("seed") = 0, py::arg("half") = false,
          py::keep_alive<1, 2>())
      .def("set_optimizer", &OutputLayer::set_optimizer, py::arg("optimizer"))
      .def_property_readonly("weights", [](py::object self) {
        auto& layer = self.cast<OutputLayer&>();
        return view(layer.weights(), {layer.config().shard.size(), layer.config().hidden}, self);
      }, "float32 [labels of the shard, hidden], a view; with `half` the bits of bfloat16, uint16")
      .def_property_readonly("bias", [](py::object self) {
        auto& layer = self.cast<OutputLayer&>();
        return view(layer.bias(), {static_cast<py::ssize_t>(layer.bias().size())}, self);
      })
      .def("state", [](py::object self) {
        auto& layer = self.cast<OutputLayer&>();
        return state_views(layer.state(), layer.config().shard.size(), layer.config().hidden, self);
      })
      .def("bias_state", [](py::object self) {
        auto& layer = self.cast<OutputLayer&>();
        return state_views(layer.bias_state(), layer.config().bias ? layer.config().shard.size() : 0, 1, self);
      })
      .def("class_mean_init", [](OutputLayer& layer, const CsrHolder& x, const CsrHolder& y, const InputConfig& input) {
        if (x.csr.values == nullptr) throw py::value_error("x needs values");
        py::gil_scoped_release release;
        layer.class_mean_init(x.csr, y.csr, input);
      }, py::arg("x"), py::arg("y"), py::arg("input"))
      .def("forward", [](OutputLayer& layer, const Batch& batch, const Array<float>& h, Sampler& sampler, Array<float>& lse,
                         std::size_t first, std::optional<std::size_t> last) {
        const std::size_t end = part_end(batch, first, last);
        want(h, {static_cast<py::ssize_t>(batch.size()), layer.config().hidden}, "h");
        want(lse, {static_cast<py::ssize_t>(end - first)}, "lse");
        const float* from = h.data();
        float* to = lse.mutable_data();
        py::gil_scoped_release release;
        layer.forward(batch, from, sampler, first, end, to);
      }, py::arg("batch"), py::arg("h").noconvert(), py::arg("sampler"), py::arg("lse").noconvert(), py::arg("first") = 0,
           py::arg("last") = py::none(),
           "Of the points [first, last), by default of all: lse [last - first]; h is the batch's, [size, hidden], and must "
           "stay unchanged until update()")
      .def("backward", [](OutputLayer& layer, const Batch& batch, const Array<float>& lse, Array<float>& dh,
                          bool weight_labels, std::int64_t global_batch, std::size_t first, std::optional<std::size_t> last) {
        const std::size_t end = part_end(batch, first, last);
        want(lse, {static_cast<py::ssize_t>(end - first)}, "lse");
        want(dh, {static_cast<py::ssize_t>(end - first), layer.config().hidden}, "dh");
        const float* from = lse.data();
        float* to = dh.mutable_data();
        py::gil_scoped_release release;
        return layer.backward(batch, from, to, weight_labels, global_batch, first, end);
      }, py::arg("batch"), py::arg("lse").noconvert(), py::arg("dh").noconvert(), py::arg("weight_labels"),
           py::arg("global_batch"), py::arg("first") = 0, py::arg("last") = py::none(),
           "Of the points [first, last), by default of all: lse [last - first], dh [last - first, hidden]")
      .def("update", &OutputLayer::update, py::arg("lr"), py::arg("step"), py::arg("may_wait") = false, NoGil(),
           "Until settle() weights and state may be those before, if rows may wait")
      .def("begin_update", &OutputLayer::begin_update, py::arg("lr"), py::arg("step"), py::arg("may_wait") = false, NoGil(),
           "As update(), of which update_some(), the next forward() or settle() do the rest")
      .def("update_some", &OutputLayer::update_some, NoGil(), "Some rows of what was begun; False if none is left")
      .def("settle", &OutputLayer::settle, NoGil(), "Makes the steps that rows wait for")
      .def_property_readonly("active_rows", &OutputLayer::active_rows)
      .def_property_readonly("active_pairs", &OutputLayer::active_pairs)
      .def("topk", [](const OutputLayer& layer, const Array<float>& h, int k, Array<std::int32_t>& ids, Array<float>& scores, std::optional<Array<double>> lse) {
        if (h.ndim() != 2 || k < 1) throw py::value_error("topk: h must be a matrix and k positive");
        const py::ssize_t points = h.shape(0);
        want(h, {points, layer.config().hidden}, "h");
        want(ids, {points, k}, "ids");
        want(scores, {points, k}, "scores");
        if (lse) want(*lse, {points}, "lse");
        const float* from = h.data();
        std::int32_t* to = ids.mutable_data();
        float* score = scores.mutable_data();
        double* sums = lse ? lse->mutable_data() : nullptr;
        py::gil_scoped_release release;
        layer.topk(from, static_cast<std::size_t>(points), k, to, score, sums);
      }, py::arg("h").noconvert(), py::arg("k"), py::arg("ids").noconvert(), py::arg("scores").noconvert(),
          py::arg("lse").noconvert() = py::none())
      .def_property_readonly_static("topk_part", [](const py::object&) { return OutputLayer::kTopkPart; })
      .def_property_readonly_static("part_points", [](const py::object&) { return OutputLayer::kPartPoints; });
}

template <class T>
Array<T> copied(const std::vector<T>& values) {
  return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// What a sampler selects, for tests and statistics.
py::dict selected(Sampler& sampler, const Batch& batch, const Array<float>& h) {
  if (h.ndim() != 2) throw py::value_error("h must be a matrix");
  want(h, {static_cast<py::ssize_t>(batch.size()), h.shape(1)}, "h");
  ActiveSet active;
  {
    const float* from = h.data();
    py::gil_scoped_release release;
    sampler.select(batch, from, active);
    if (active.all) {
      active.rows.resize(active.row_count);
      std::iota(active.rows.begin(), active.rows.end(), 0);
    }
  }
  std::vector<std::int32_t> positions, points;
  for (const ActiveSet::Own& own : active.own) {
    positions.push_back(own.position);
    points.push_back(own.point);
  }
  py::dict found;
  found["shared"] = active.shared;
  found["rows"] = copied(active.rows);
  found["log_q"] = copied(active.log_q);
  found["own_only"] = copied(active.own_only);
  found["own_positions"] = copied(positions);
  found["own_points"] = copied(points);
  found["pair_indptr"] = copied(active.pair_indptr);
  found["pair_points"] = copied(active.pair_points);
  return found;
}

LshSampler::Selection selection_from_name(const std::string& name) {
  if (name == "union") return LshSampler::Selection::kUnion;
  if (name == "vanilla") return LshSampler::Selection::kVanilla;
  if (name == "top-k") return LshSampler::Selection::kTopK;
  if (name == "threshold") return LshSampler::Selection::kThreshold;
  throw py::value_error("unknown selection '" + name + "'; choose union, vanilla, top-k or threshold");
}

// True for `yes`, false for `no`.
bool one_of(const std::string& value, const char* what, const char* no, const char* yes) {
  if (value != no && value != yes)
    throw py::value_error(std::string("unknown ") + what + " '" + value + "'; choose " + no + " or " + yes);
  return value == yes;
}

HashConfig hash_config(const std::string& family, int k, int l, const std::string& projections, const std::string& zeros,
                       const std::string& packing) {
  HashConfig config;
  config.family = hash_family_from_name(family);
  config.k = k;
  config.l = l;
  config.dense_projections = one_of(projections, "projections", "sparse", "dense");
  config.zeros_are_values = one_of(zeros, "zeros", "missing", "values");
  config.published_packing = one_of(packing, "packing", "exact", "published");
  return config;
}

void bind_samplers(py::module_& m) {
  m.def("hash_codes", [](Pool& pool, const Array<float>& x, std::uint64_t seed, const std::string& family, int k, int l,
                         const std::string& projections, const std::string& zeros, const std::string& packing) {
    if (x.ndim() != 2) throw py::value_error("x must be a matrix");
    const auto hash = make_hash_family(x.shape(1), hash_config(family, k, l, projections, zeros, packing), seed);
    Array<std::uint32_t> codes({static_cast<py::ssize_t>(l), x.shape(0)});
    const float* from = x.data();
    std::uint32_t* to = codes.mutable_data();
    const auto count = static_cast<std::size_t>(x.shape(0));
    py::gil_scoped_release release;
    hash->hash(pool, from, count, to, count);
    return codes;
  }, py::arg("pool"), py::arg("x").noconvert(), py::arg("seed"), py::kw_only(), py::arg("family"), py::arg("k"), py::arg("l"),
     py::arg("projections") = "sparse", py::arg("zeros") = "missing", py::arg("packing") = "exact",
     "Buckets uint32 [l, n] of the rows of x float32 [n, dim].");
  py::class_<Sampler>(m, "Sampler")
      .def("select", &selected, py::arg("batch"), py::arg("h").noconvert(),
           "What a batch with hidden activations h float32 [size, hidden] makes active, as a dictionary of the arrays of "
           "active_set.hpp; rows are local to the shard.");
  py::class_<FullSampler, Sampler>(m, "FullSampler")
      .def(py::init([](std::int64_t total, std::int64_t begin, std::int64_t end) {
        return std::make_unique<FullSampler>(Shard{total, begin, end});
      }), py::arg("labels_total"), py::arg("label_begin"), py::arg("label_end"));
  py::class_<LshSampler, Sampler>(m, "LshSampler")
      .def(py::init([](OutputLayer& layer, const std::string& family, int k, int l, const std::string& projections,
                       const std::string& zeros, const std::string& packing, const std::string& bucket_policy,
                       std::int64_t bucket_cap, const std::string& selection, std::int64_t beta, std::int64_t min_hits,
                       std::int64_t min_active, std::int64_t top_up, std::uint64_t seed) {
        LshSampler::Config config;
        config.hash = hash_config(family, k, l, projections, zeros, packing);
        config.policy = one_of(bucket_policy, "bucket policy", "fifo", "reservoir") ? HashTables::Policy::kReservoir
                                                                                   : HashTables::Policy::kFifo;
        config.bucket_cap = bucket_cap;
        config.selection = selection_from_name(selection);
        config.beta = beta;
        config.min_hits = min_hits;
        config.min_active = min_active;
        config.top_up = top_up;
        config.seed = seed;
        return std::make_unique<LshSampler>(layer, config);
      }), py::arg("layer"), py::kw_only(), py::arg("family") = "simhash", py::arg("k") = 9, py::arg("l") = 50,
          py::arg("projections") = "sparse", py::arg("zeros") = "missing", py::arg("packing") = "exact",
          py::arg("bucket_policy") = "fifo", py::arg("bucket_cap") = 128, py::arg("selection") = "union",
          py::arg("beta") = 1000, py::arg("min_hits") = 2, py::arg("min_active") = 0, py::arg("top_up") = 0,
          py::arg("seed") = 0, py::keep_alive<1, 2>())
      .def("rebuild", &LshSampler::rebuild, py::arg("draw") = 0, NoGil(), "`draw` keys the reservoir's draws.")
      .def("new_functions", &LshSampler::new_functions, py::arg("seed"), NoGil());
  py::class_<InBatchSampler, Sampler>(m, "InBatchSampler")
      .def(py::init([](std::int64_t total, std::int64_t begin, std::int64_t end, const Array<std::int64_t>& counts,
                       std::int64_t num_points, std::int64_t batch_size, std::int64_t extras, std::int64_t log_uniform,
                       bool log_q, bool own_only, std::uint64_t seed, LshSampler* proposer) {
        want(counts, {total}, "counts");
        InBatchSampler::Config config;
        config.num_points = num_points;
        config.batch_size = batch_size;
        config.extras = extras;
        config.log_uniform = log_uniform;
        config.log_q = log_q;
        config.own_only = own_only;
        config.seed = seed;
        return std::make_unique<InBatchSampler>(Shard{total, begin, end}, config, counts.data(), proposer);
      }), py::arg("labels_total"), py::arg("label_begin"), py::arg("label_end"), py::arg("counts").noconvert(), py::kw_only(),
          py::arg("num_points"), py::arg("batch_size"), py::arg("extras") = 0, py::arg("log_uniform") = 0,
          py::arg("log_q") = true, py::arg("own_only") = false, py::arg("seed") = 0, py::arg("proposer") = nullptr,
          py::keep_alive<1, 13>());
}

void bind_wire(py::module_& m) {
  m.def("row_bytes", [](const std::string& kind, std::size_t n) { return row_bytes(wire_from_name(kind), n); },
        py::arg("kind"), py::arg("n"), "Bytes of one row of n values on the wire.");
  m.def("pack_rows", [](const Array<float>& x, py::ssize_t begin, py::ssize_t end, const std::string& kind, Array<std::uint8_t>& out) {
    if (x.ndim() != 2 || begin < 0 || end < begin || end > x.shape(1)) throw py::value_error("pack_rows: columns out of range");
    const Wire wire = wire_from_name(kind);
    const auto rows = static_cast<std::size_t>(x.shape(0)), ld = static_cast<std::size_t>(x.shape(1));
    const auto b = static_cast<std::size_t>(begin), e = static_cast<std::size_t>(end);
    want(out, {static_cast<py::ssize_t>(rows * row_bytes(wire, e - b))}, "out");
    pack_rows(x.data(), rows, ld, b, e, wire, out.mutable_data());
  }, py::arg("x").noconvert(), py::arg("begin"), py::arg("end"), py::arg("kind"), py::arg("out").noconvert(),
     "Columns [begin, end) of x float32 [rows, ld] -> out uint8 [rows * row_bytes].");
  m.def("unpack_rows", [](const Array<std::uint8_t>& in, const std::string& kind, Array<float>& x, py::ssize_t begin, py::ssize_t end, bool add) {
    if (x.ndim() != 2 || begin < 0 || end < begin || end > x.shape(1)) throw py::value_error("unpack_rows: columns out of range");
    const Wire wire = wire_from_name(kind);
    const auto rows = static_cast<std::size_t>(x.shape(0)), ld = static_cast<std::size_t>(x.shape(1));
    const auto b = static_cast<std::size_t>(begin), e = static_cast<std::size_t>(end);
    want(in, {static_cast<py::ssize_t>(rows * row_bytes(wire, e - b))}, "in");
    unpack_rows(in.data(), rows, ld, b, e, wire, x.mutable_data(), add);
  }, py::arg("buffer").noconvert(), py::arg("kind"), py::arg("x").noconvert(), py::arg("begin"), py::arg("end"), py::arg("add") = false);
}

}  // namespace

void bind_core(py::module_& m) {
  m.attr("compiler") = DSLIDE_COMPILER;
  m.def("instruction_set", [] { return std::string(kernels().name); }, "The instruction set in use (DSLIDE_ISA overrides).");
  m.def("supported_instruction_sets", [] {
    std::vector<std::string> names;
    for (const Kernels* k : supported_kernels()) names.emplace_back(k->name);
    return names;
  });
  py::class_<Pool>(m, "Pool").def(py::init<int>(), py::arg("threads")).def_property_readonly("threads", &Pool::threads);
  py::class_<CsrHolder, std::shared_ptr<CsrHolder>>(m, "Csr")
      .def(py::init(&make_csr), py::arg("indptr").noconvert(), py::arg("indices").noconvert(), py::arg("values"), py::arg("columns"));
  py::class_<Batch>(m, "Batch")
      .def(py::init([](Pool& pool, std::shared_ptr<CsrHolder> x, std::shared_ptr<CsrHolder> y) {
        if (x->csr.values == nullptr) throw py::value_error("x needs values");
        return std::make_unique<Batch>(pool, x->csr, y->csr);
      }), py::arg("pool"), py::arg("x"), py::arg("y"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
      .def("select", [](Batch& batch, const Array<std::int64_t>& rows, std::uint64_t step) {
        if (rows.ndim() != 1) throw py::value_error("rows must be a vector");
        const std::int64_t* data = rows.data();
        const auto count = static_cast<std::size_t>(rows.size());
        py::gil_scoped_release release;
        batch.select(data, count, step);
      }, py::arg("rows").noconvert(), py::arg("step"))
      .def_property_readonly("size", &Batch::size);
  bind_layers(m);
  bind_samplers(m);
  bind_wire(m);
}
