// The Python door of the C++ runtime: pybind11 appears in this file alone. Every wait and every copy gives up the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <map>
#include <variant>

#include "cuda_stream.h"
#include "host_stream.h"
#include "pack.h"
#include "view.h"

namespace py = pybind11;
using namespace tensorrt_llm_ext;

namespace {

// ---- errors ----

const char* class_of(Kind kind) {
    switch (kind) {
        case Kind::deadline: return "DeadlineExceeded";
        case Kind::plan: return "PlanError";
        case Kind::closed: return "SessionClosed";
        case Kind::memory: return "OutOfMemory";
        default: return "BackendError";
    }
}

void raise(const Error& error) {
    if (error.kind == Kind::call) {  // what the call raised, as it raised it
        auto* raised = static_cast<PyObject*>(error.cause.get());
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised)), raised);
        return;
    }
    py::object type = py::module_::import("tensorrt_llm_ext.errors").attr(class_of(error.kind));
    py::object raised = type(error.sentence, py::arg("expected") = error.expected, py::arg("found") = error.found, py::arg("fix") = error.fix);
    PyErr_SetObject(type.ptr(), raised.ptr());
}

// Frees a Python object from any thread, at any time.
void drop(void* object) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(object));
}

void invoke(void* callable, const SlotRef& slot) {
    if (!Py_IsInitialized()) throw session_closed();  // a worker that outlived the interpreter
    py::gil_scoped_acquire gil;
    try {
        py::handle(static_cast<PyObject*>(callable))(slot);
    } catch (py::error_already_set& raised) {
        const std::string type = py::str(raised.type().attr("__name__")), text = py::str(raised.value());
        Error error(Kind::call, "the call that a stream ran raised " + type, "a call that returns", type + ": " + text, "see the error itself");
        // Until someone waits for it, the error must not keep alive what its frames refer to: that may be the stream itself.
        py::module_::import("traceback").attr("clear_frames")(raised.trace() ? raised.trace() : py::none());
        error.cause = std::shared_ptr<void>(raised.value().inc_ref().ptr(), drop);
        throw error;
    }
}

// ---- waiting ----

template <class Act>
void without_gil(Act act) {
    if (!Py_IsInitialized() || !PyGILState_Check()) return act();
    py::gil_scoped_release release;
    act();
}

Clock::time_point deadline_from(double timeout_s) {
    if (!(timeout_s >= 0 && timeout_s <= 1e9)) throw py::value_error("timeout_s must be a number of seconds from 0 to 1e9");
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
}

// Calls attempt(deadline) until it gives something true or timeout_s is over; Ctrl-C gets through. False when it is over.
template <class Attempt>
bool wait_patiently(double timeout_s, Attempt attempt) {
    constexpr std::chrono::milliseconds kSlice{50};
    const auto deadline = deadline_from(timeout_s);
    while (true) {
        bool is_met = false;
        without_gil([&] { is_met = attempt(std::min(deadline, Clock::now() + kSlice)); });
        if (is_met) return true;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (Clock::now() >= deadline) return false;
    }
}

// ---- arrays ----

const int32_t* int32_from(const py::array& array, const char* name) {
    const bool is_int32 = array.dtype().equal(py::dtype::of<int32_t>());
    if (is_int32 && array.ndim() == 1 && (array.flags() & py::array::c_style)) return static_cast<const int32_t*>(array.data());
    std::string found = py::str(array.dtype());
    found += " " + std::string(py::str(py::tuple(py::cast(std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim())))));
    throw Error(Kind::plan, std::string(name) + " has another form than pack reads", "int32, one dimension, contiguous",
                found, "np.ascontiguousarray(array, dtype=np.int32)");
}

py::object numpy_dtype(const Dtype& dtype) {
    static auto* known = new std::map<const Dtype*, py::object>();  // kept to the end of the process
    py::object& object = (*known)[&dtype];
    if (!object) {
        const bool is_own = dtype.dlpack_code == 4 || dtype.dlpack_code >= 10;  // not a type of NumPy itself
        py::object name = is_own ? py::object(py::module_::import("ml_dtypes").attr(dtype.name)) : py::object(py::str(dtype.name));
        object = py::module_::import("numpy").attr("dtype")(name);
    }
    return object;
}

py::array numpy_from_view(const py::object& self) {
    const auto& view = self.cast<const View&>();
    py::array array(py::reinterpret_borrow<py::dtype>(numpy_dtype(*view.dtype)), view.shape, {}, view.data, self);  // self keeps the slot
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
}

template <class Managed>
py::capsule capsule_from_view(const View& view) {
    Managed* managed = dlpack_from_view<Managed>(view);
    if constexpr (std::is_same_v<Managed, DlManagedTensorVersioned>) {
        managed->major = 1;
        managed->flags = kDlReadOnly;
    }
    return py::capsule(managed, Managed::kName, [](PyObject* capsule) {  // a consumer renames it and then frees the tensor itself
        if (!PyCapsule_IsValid(capsule, Managed::kName)) return;
        auto* unused = static_cast<Managed*>(PyCapsule_GetPointer(capsule, Managed::kName));
        unused->deleter(unused);
    });
}

py::capsule dlpack(const View& view, const py::object&, std::optional<std::pair<int, int>> max_version,
                   std::optional<std::pair<int, int>> dl_device, std::optional<bool> copy) {
    if (dl_device && *dl_device != std::pair<int, int>(kDlCpu, 0)) throw py::buffer_error("a view lies in host memory: DLPack device (1, 0)");
    if (copy.value_or(false)) throw py::buffer_error("a view is never copied: copy it with numpy().copy()");
    if (max_version && max_version->first >= 1) return capsule_from_view<DlManagedTensorVersioned>(view);
    return capsule_from_view<DlManagedTensor>(view);
}

py::typing::Dict<py::str, View> views(const SlotRef& slot, bool is_output) {
    py::typing::Dict<py::str, View> views;
    for_each_view(slot, is_output, [&](const std::string& name, View view) { views[py::str(name)] = py::cast(std::move(view)); });
    return views;
}

// ---- the parts ----

std::shared_ptr<Layout> make_layout(
    const std::vector<std::tuple<std::string, std::string, std::string, std::vector<std::variant<int64_t, std::string>>>>& tensors,
    int64_t vocab_size, int64_t max_num_tokens, int64_t max_batch_size, int64_t max_seq_len, int64_t max_padded_tokens) {
    std::vector<TensorSpec> specs;
    for (const auto& [name, role, dtype, shape] : tensors) {
        TensorSpec spec{name, role, dtype, {}};
        for (const auto& size : shape) {
            if (const auto* symbol = std::get_if<std::string>(&size)) spec.shape.push_back({symbol->size() == 1 ? (*symbol)[0] : '?', 0});
            else spec.shape.push_back({0, std::get<int64_t>(size)});
        }
        specs.push_back(std::move(spec));
    }
    return std::make_shared<Layout>(specs, Limits{vocab_size, max_num_tokens, max_batch_size, max_seq_len, max_padded_tokens});
}

Convention convention_named(const std::string& name) {
    if (name == "prefix_sum") return Convention::prefix_sum;
    if (name == "index") return Convention::index;
    if (name == "none") return Convention::none;
    throw Error(Kind::plan, "'" + name + "' is not a gather convention", "prefix_sum, index or none", name, "measure the convention of the engine");
}

void pack_arrays(std::shared_ptr<Layout> layout, const py::array& token_ids, const py::array& offsets, const SlotRef& slot,
                 const std::string& convention, uint64_t batch, const py::bytes& digest, const std::optional<py::array>& last_token_ids) {
    std::array<uint8_t, 16> digest_bytes;
    const std::string_view digest_view = digest;
    if (digest_view.size() != digest_bytes.size()) throw py::value_error("digest must have 16 bytes, found " + std::to_string(digest_view.size()));
    std::copy(digest_view.begin(), digest_view.end(), digest_bytes.begin());
    PackedIds ids{int32_from(token_ids, "token_ids"), int32_from(offsets, "offsets"), {}, convention_named(convention), nullptr, 0};
    ids.sizes.batch_size = static_cast<int32_t>(std::min<py::ssize_t>(offsets.size() - 1, INT32_MAX));
    if (last_token_ids) {
        ids.given_last_token_ids = int32_from(*last_token_ids, "last_token_ids");
        if (last_token_ids->size() != ids.sizes.batch_size) throw py::value_error("last_token_ids must have one value a sequence");
    }
    without_gil([&] { pack(layout, ids, token_ids.size(), *slot, batch, digest_bytes); });
}

std::map<std::string, int64_t> arena_stats(const PinnedArena& arena) {
    const auto stats = arena.stats();
    return {{"mapped_bytes", stats.mapped_bytes}, {"num_slots", stats.num_slots}, {"slots_out", stats.slots_out},
            {"acquired", stats.acquired},         {"waited", stats.waited},       {"is_huge", stats.is_huge}};
}

std::map<std::string, int64_t> module_stats() {
    return {{"slots_out", counters.slots_out},
            {"tickets_open", counters.tickets_open},
            {"streams_open", counters.streams_open},
            {"mapped_bytes", counters.mapped_bytes},
            {"device_bytes", counters.device_bytes},
            {"allocations", counters.allocations},
            {"synchronisations", counters.synchronisations},
            {"destructor_errors", counters.destructor_errors},
            {"abandoned_bytes", counters.abandoned_bytes}};
}

std::shared_ptr<PinnedArena> open_arena(size_t slot_bytes, size_t num_slots, const std::optional<std::shared_ptr<Driver>>& driver) {
    std::shared_ptr<PinnedArena> arena;
    without_gil([&] { arena = PinnedArena::open(slot_bytes, num_slots, driver.value_or(nullptr)); });
    return arena;
}

SlotRef acquire(const std::shared_ptr<PinnedArena>& arena, double timeout_s, const std::optional<std::shared_ptr<Stream>>& stream) {
    SlotRef slot;
    const auto attempt = [&](Clock::time_point deadline) {
        if (stream) (*stream)->raise_if_ended();  // what it failed with, or that it was closed: no slot will come home from it
        return bool(slot = arena->acquire(deadline));
    };
    if (!wait_patiently(timeout_s, attempt)) throw arena->none_free(timeout_s);
    return slot;
}

// The streams that are open, so that leaving the interpreter can close them before it takes Python away from their workers.
std::vector<std::weak_ptr<Stream>>& open_streams() {
    static auto* streams = new std::vector<std::weak_ptr<Stream>>();
    return *streams;
}

// A stream whose destructor, which waits, runs without the GIL: its worker may need it to finish.
template <class Opened, class... Arguments>
std::shared_ptr<Opened> open_stream(Arguments... arguments) {
    std::shared_ptr<Opened> stream(new Opened(arguments...), [](Opened* last) { without_gil([&] { delete last; }); });
    auto& streams = open_streams();
    streams.erase(std::remove_if(streams.begin(), streams.end(), [](const auto& other) { return other.expired(); }), streams.end());
    streams.push_back(stream);
    return stream;
}

void close_stream(const std::shared_ptr<Stream>& stream, double timeout_s) {
    const auto deadline = deadline_from(timeout_s);
    without_gil([&] { stream->close(deadline); });
}

void close_all() {
    for (const auto& stream : open_streams()) {
        try {
            if (const auto open = stream.lock()) close_stream(open, 5.0);
        } catch (const Error&) {
            ++counters.destructor_errors;
        }
    }
}

using Shape = py::typing::Tuple<py::int_, py::ellipsis>;

void run(Stream& stream, const SlotRef& slot, const py::typing::Callable<void(SlotRef)>& call) {
    Call owned(py::object(call).release().ptr(), invoke, drop);
    without_gil([&] { stream.run(slot, std::move(owned)); });
}

py::typing::Dict<py::str, View> wait(Ticket& ticket, double timeout_s) {
    if (!wait_patiently(timeout_s, [&](Clock::time_point deadline) { return ticket.wait(deadline); })) throw ticket.late(timeout_s);
    return ticket.slot() ? views(ticket.slot(), true) : py::typing::Dict<py::str, View>();
}

py::typing::Tuple<py::int_, py::int_, py::bytes> came_back(const Ticket& ticket) {
    if (!ticket.slot()) throw Error(Kind::plan, "nothing came back with this ticket", "a batch", "a ring without a slot", "ring with a slot");
    const Stamp& stamp = ticket.slot()->returned_stamp();
    return py::make_tuple(stamp.batch, stamp.sizes.num_tokens, py::bytes(reinterpret_cast<const char*>(stamp.digest.data()), stamp.digest.size()));
}

Shape shape_of(const View& view) { return py::tuple(py::cast(view.shape)); }

py::typing::List<py::typing::Tuple<py::str, Shape, py::int_>> bound_tensors(const Stream& stream, const SlotRef& slot) {
    py::typing::List<py::typing::Tuple<py::str, Shape, py::int_>> bound;
    const uintptr_t image = stream.image(*slot), host = reinterpret_cast<uintptr_t>(slot->data());
    slot->layout().for_each(slot->sizes(), [&](const Tensor& tensor, size_t offset, size_t) {
        py::tuple shape(tensor.shape.size());
        for (size_t i = 0; i < tensor.shape.size(); ++i) shape[i] = tensor.shape[i].in(slot->sizes());
        const uintptr_t address = tensor.place == Place::host_input ? host + offset
                                  : tensor.place == Place::output   ? image + offset - stream.output_shift()
                                                                    : image + offset;
        bound.append(py::make_tuple(tensor.name, shape, address));
    });
    return bound;
}

}  // namespace

PYBIND11_MODULE(_runtime, module) {
    using namespace py::literals;
    module.doc() = "The C++ runtime: pinned arena, stream, doorbell, packer.";
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const Error& error) {
            raise(error);
        }
    });

    // All classes before their methods, so that every signature names Python's types.
    py::class_<Driver, std::shared_ptr<Driver>> driver(module, "Driver", "The CUDA driver, opened by path, with the primary context of one device.");
    py::class_<PinnedArena, std::shared_ptr<PinnedArena>> arena(
        module, "PinnedArena", "One mapping, every page touched, registered with the driver when one is given; divided into slots.");
    py::class_<SlotRef> slot(module, "Slot", "A piece of the arena with one owner; it goes home when its last reference dies: ticket, view or this.");
    py::class_<Layout, std::shared_ptr<Layout>> layout(
        module, "Layout", "Where the engine's tensors lie in a slot, as a pure function of the batch's sizes.");
    py::class_<Stream, std::shared_ptr<Stream>> stream(
        module, "Stream", "An order of work: run (bind), copy_in, run (enqueue), copy_out, ring. Never synchronises; its first failure is its last.");
    py::class_<HostStream, Stream, std::shared_ptr<HostStream>> host_stream(
        module, "HostStream", "One worker thread that works in order; the slot itself is the device's memory.");
    py::class_<CudaStream, Stream, std::shared_ptr<CudaStream>> cuda_stream(
        module, "CudaStream", "A CUDA stream, and the device memory that mirrors one slot.");
    py::class_<Ticket> ticket(module, "Ticket", "A batch in flight: slot, doorbell value, shapes. The only way to the outputs is wait().");
    py::class_<View> view(module, "View", "A read-only tensor inside a slot, without a copy; it keeps the slot alive.");
    const py::call_guard<py::gil_scoped_release> no_gil;

    driver.def(py::init<const std::string&, int>(), "path"_a = "libcuda.so.1", "device"_a = 0,
               "Open the driver library and retain the device's primary context. Raises BackendError with the driver's words.");
    driver.def("calls", &Driver::calls, "Calls made so far, by entry point.");
    driver.def_property_readonly("version", &Driver::version, "The CUDA version the driver speaks: 13000 is 13.0.");

    arena.def(py::init(&open_arena), "slot_bytes"_a, "num_slots"_a, "driver"_a = py::none(),
              "Map the slots. Raises OutOfMemory with the bytes needed and free, and keeps nothing then.");
    arena.def("acquire", acquire, "timeout_s"_a, "stream"_a = py::none(),
              "Take a free slot, or wait for one to come home. Raises DeadlineExceeded, SessionClosed after close(), and what stream ended with.");
    arena.def("close", &PinnedArena::close, "Give out no more slots. The memory goes with the last slot; views stay valid until then.");
    arena.def("stats", arena_stats, "mapped_bytes, is_huge (pages of the kernel's pool), num_slots, slots_out, acquired, waited (acquired late).");
    arena.def_property_readonly("num_slots", &PinnedArena::num_slots);
    arena.def_property_readonly("slot_bytes", &PinnedArena::slot_bytes);

    slot.def("inputs", [](const SlotRef& self) { return views(self, false); }, "The arrays that pack wrote, by tensor name.");
    slot.def_property_readonly("address", [](const SlotRef& self) { return reinterpret_cast<uintptr_t>(self->data()); });
    slot.def_property_readonly("index", [](const SlotRef& self) { return self->index(); });
    slot.def_property_readonly("num_bytes", [](const SlotRef& self) { return self->num_bytes(); });

    layout.def(py::init(&make_layout), "tensors"_a, py::kw_only(), "vocab_size"_a, "max_num_tokens"_a, "max_batch_size"_a, "max_seq_len"_a,
               "max_padded_tokens"_a,
               "tensors: (name, 'input' or 'output', dtype, shape of sizes and the symbols T, B, S). Raises PlanError for an input that pack cannot fill.");
    layout.def_property_readonly("slot_bytes", &Layout::slot_bytes, "Bytes of a slot that holds every batch within the limits.");
    layout.def_property_readonly("has_host_inputs", &Layout::has_host_inputs, "Does the engine read host_* inputs at enqueue?");

    stream.def("run", run, "slot"_a, "call"_a, "Run call(slot) in stream order: on a CUDA stream in this thread (it enqueues), on a host stream in its worker.");
    stream.def("copy_in", &Stream::copy_in, "slot"_a, no_gil, "Take the batch's inputs to where the engine reads them.");
    stream.def("copy_out", &Stream::copy_out, "slot"_a, no_gil, "Bring the batch's outputs back into the slot, in one piece.");
    stream.def("ring", [](Stream& self, const std::optional<SlotRef>& slot) { return self.ring(slot.value_or(SlotRef())); },
               "slot"_a = py::none(), no_gil, "Enqueue the write that says the batch, or without a slot all that was enqueued, has come back.");
    stream.def("arm", [](Stream& self, const std::optional<SlotRef>& slot, bool shape_has_run) { self.arm(slot.value_or(SlotRef()), shape_has_run); },
               "slot"_a = py::none(), py::kw_only(), "shape_has_run"_a, no_gil,
               "Make the stream wait here for release(). Refused before the shape has run (its kernels load lazily, and behind an armed wait that "
               "deadlocks) and for an engine with host inputs.");
    stream.def("release", &Stream::release, no_gil, "Let the stream pass every wait armed so far.");
    stream.def("is_idle", &Stream::is_idle, no_gil, "Has everything finished? Raises what the stream failed with.");
    stream.def("tensors", bound_tensors, "slot"_a, "(name, shape, address) of every tensor of the packed batch, as the engine must bind it.");
    stream.def("close", close_stream, "timeout_s"_a,
               "Take no more work, and let what runs end. A host stream drops what has not begun. Raises DeadlineExceeded when work is left. Idempotent.");
    stream.def_property_readonly("handle", &Stream::handle, "What an engine's enqueue takes: the CUstream, or 0.");
    stream.def_property_readonly("written", &Stream::last_written, "The value the stream wrote to its doorbell last.");

    host_stream.def(py::init(&open_stream<HostStream, uint32_t>), py::kw_only(), "first_value"_a = 0);
    cuda_stream.def(py::init(&open_stream<CudaStream, std::shared_ptr<Driver>, size_t, uint32_t>), "driver"_a, "slot_bytes"_a, py::kw_only(),
                    "first_value"_a = 0);
    cuda_stream.def_property_readonly("has_memory_operations", &CudaStream::has_memory_operations, "False: a host function rings the doorbell.");

    ticket.def("wait", wait, "timeout_s"_a,
               "The outputs by tensor name, once the batch has come back. Raises DeadlineExceeded (wait again, if you like), what the batch failed "
               "with, or SessionClosed behind an earlier failure.");
    ticket.def_property_readonly("came_back", came_back, "(batch, total rows, digest) as they travelled through the stream with the data; after wait().");
    ticket.def_property_readonly("is_done", &Ticket::is_done, "Has the doorbell rung for this batch?");
    ticket.def_property_readonly("batch", &Ticket::batch);
    ticket.def_property_readonly("value", &Ticket::value, "The doorbell value that says the batch has come back.");

    view.def("numpy", numpy_from_view, "The tensor as a NumPy array, read-only.");
    view.def("__dlpack__", dlpack, py::kw_only(), "stream"_a = py::none(), "max_version"_a = py::none(), "dl_device"_a = py::none(), "copy"_a = py::none());
    view.def("__dlpack_device__", [](const View&) { return std::pair<int, int>(kDlCpu, 0); });
    view.def_property_readonly("dtype", [](const View& self) { return self.dtype->name; });
    view.def_property_readonly("shape", shape_of);

    py::tuple known_inputs(std::size(kKnownInputs));
    for (size_t i = 0; i < std::size(kKnownInputs); ++i) known_inputs[i] = kKnownInputs[i].name;
    module.attr("KNOWN_INPUTS") = known_inputs;
    module.def("pack", pack_arrays, "layout"_a, "token_ids"_a, "offsets"_a, "slot"_a, py::kw_only(), "convention"_a, "batch"_a, "digest"_a,
               "last_token_ids"_a = py::none(),
               "Write every input of a batch into the slot; sequence i is token_ids[offsets[i]:offsets[i + 1]]. The 16 bytes of digest and the batch's number travel with it. last_token_ids replaces the computed values.");
    module.def("stats", module_stats, "What the module holds now and did so far, over all its objects.");
    py::module_::import("atexit").attr("register")(py::cpp_function(close_all));
}
