// id_lines: JSON lines that hold nothing but token ids and plain fields, read without Python.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tensorrt_llm_ext {

// What lines said: line i has token_ids[offsets[i] : offsets[i + 1]], and request_ids[i] where one was asked for.
struct IdLines {
    std::vector<int32_t> token_ids;
    std::vector<int64_t> offsets{0};
    std::vector<std::string_view> request_ids;  // within the lines
};

// Reads lines from the first on, up to one that is not plain: the caller's JSON parser says what that one means.
//
// A plain line is one JSON object, printable ASCII, without escapes, without a key that repeats; `ids_field` is an array of whole
// numbers from 0 that fit 32 bits, at least one; `request_id_field` is a string that is not empty, or a whole number from 0;
// every other value is a string, a number, true, false or null. So whatever is read here, any JSON parser reads alike.
IdLines read_id_lines(const std::vector<std::string_view>& lines, std::string_view ids_field,
                      const std::optional<std::string>& request_id_field);

}  // namespace tensorrt_llm_ext
