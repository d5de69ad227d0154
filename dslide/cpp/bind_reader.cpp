#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>

#include "reader.hpp"

namespace py = pybind11;

namespace {

// Hands a vector over to numpy without a copy.
template <class T>
py::array_t<T> array(std::vector<T>&& values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  const auto size = static_cast<py::ssize_t>(owner->size());
  T* data = owner->data();
  py::capsule free(owner.release(), [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  return py::array_t<T>(size, data, free);
}

// (line, column, reason, kind)
py::object to_tuple(const dslide::XcError& error) {
  constexpr const char* kKinds[] = {"syntax", "feature outside", "label outside"};
  return py::make_tuple(error.line, error.column, error.what(), kKinds[static_cast<int>(error.kind)]);
}

py::dict to_dict(dslide::XcPoints&& points) {
  py::dict result;
  result["x_lengths"] = array(std::move(points.x_lengths));
  result["x_indices"] = array(std::move(points.x_indices));
  result["x_values"] = array(std::move(points.x_values));
  result["y_lengths"] = array(std::move(points.y_lengths));
  result["y_indices"] = array(std::move(points.y_indices));
  result["unsorted"] = points.unsorted;
  result["duplicates"] = points.duplicates;
  result["blank_tail"] = points.blank_tail;
  result["lines"] = points.lines;
  result["skipped"] = points.skipped;
  result["first_skipped"] = points.first_skipped ? to_tuple(*points.first_skipped) : py::object(py::none());
  return result;
}

py::object parse_xc(dslide::Pool& pool, const py::buffer& buffer, std::int64_t features, std::int64_t labels,
                    std::int64_t feature_base, std::int64_t label_base, bool comments, bool lenient) {
  const py::buffer_info info = buffer.request();
  if (info.itemsize != 1 || info.ndim != 1 || info.strides[0] != 1) {
    throw py::value_error("parse_xc: expected contiguous bytes");
  }
  const std::string_view text(static_cast<const char*>(info.ptr), static_cast<std::size_t>(info.size));
  std::vector<dslide::XcPoints> parts;
  std::optional<dslide::XcError> error;
  {
    const py::gil_scoped_release release;
    try {
      parts = dslide::parse_xc(pool, text, {features, labels, feature_base, label_base, comments, lenient});
    } catch (const dslide::XcError& e) {
      error = e;
    }
  }
  if (error) return to_tuple(*error);
  py::list result;
  for (auto& part : parts) result.append(to_dict(std::move(part)));
  return std::move(result);
}

}  // namespace

void bind_reader(py::module_& module) {
  module.def("parse_xc", &parse_xc, py::arg("pool"), py::arg("text"), py::arg("features"), py::arg("labels"),
             py::arg("feature_base") = 0, py::arg("label_base") = 0, py::arg("comments") = false,
             py::arg("lenient") = false,
             "Parses lines of the XC format. Returns consecutive parts of the points, each a dict of arrays\n"
             "(x_lengths int64, x_indices int32, x_values float32, y_lengths int64, y_indices int32) and counts\n"
             "(unsorted, duplicates, blank_tail, lines, skipped), or for the first line that isn't in the format a\n"
             "tuple (line from 0, column from 1, reason, kind: syntax, feature outside or label outside). With\n"
             "`lenient` such lines are left out; first_skipped is the first one's tuple. With `labels` = -1 the text\n"
             "is a matrix of features alone. With `comments` a '#' ends a line.");
}
