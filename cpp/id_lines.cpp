#include "id_lines.h"

#include <algorithm>
#include <array>

namespace tensorrt_llm_ext {

namespace {

constexpr size_t kMaxFields = 16;     // of a plain line
constexpr size_t kMaxNumber = 64;     // characters
constexpr int64_t kMaxId = INT32_MAX;

// Steps through one line; every step says whether the line is still a plain one.
class Line {
public:
    explicit Line(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

    void skip_space() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
    }

    // The character, with the space around it.
    bool take(char wanted) {
        skip_space();
        if (at_ == end_ || *at_ != wanted) return false;
        ++at_;
        skip_space();
        return true;
    }

    bool next_is(char wanted) const { return at_ < end_ && *at_ == wanted; }

    bool is_at_end() const { return at_ == end_; }

    bool string(std::string_view& text) {
        if (!next_is('"')) return false;
        const char* start = ++at_;
        while (at_ < end_ && *at_ >= 0x20 && *at_ < 0x7f && *at_ != '"' && *at_ != '\\') ++at_;
        if (!next_is('"')) return false;
        text = {start, static_cast<size_t>(at_++ - start)};
        return true;
    }

    // A whole number from 0, as JSON writes it: no sign, no zeros before it.
    bool whole(int64_t& value) {
        const char* start = at_;
        value = 0;
        while (at_ < end_ && is_digit(*at_) && at_ - start < 18) value = value * 10 + (*at_++ - '0');
        const bool has_more = at_ < end_ && (is_digit(*at_) || *at_ == '.' || *at_ == 'e' || *at_ == 'E');
        return at_ > start && !has_more && (*start != '0' || at_ - start == 1);
    }

    bool token_ids(std::vector<int32_t>& ids) {
        if (!take('[')) return false;
        do {
            int64_t id;
            if (!whole(id) || id > kMaxId) return false;
            ids.push_back(static_cast<int32_t>(id));
        } while (take(','));
        return take(']');
    }

    bool request_id(std::string_view& id) {
        if (next_is('"')) return string(id) && !id.empty();
        const char* start = at_;
        int64_t value;
        if (!whole(value)) return false;
        id = {start, static_cast<size_t>(at_ - start)};
        return true;
    }

    bool skip_value() {
        std::string_view text;
        if (next_is('"')) return string(text);
        for (const std::string_view word : {"true", "false", "null"}) {
            if (std::string_view(at_, static_cast<size_t>(end_ - at_)).substr(0, word.size()) == word) return at_ += word.size(), true;
        }
        return skip_number();
    }

private:
    static bool is_digit(char c) { return c >= '0' && c <= '9'; }

    bool digits() {
        const char* start = at_;
        while (at_ < end_ && is_digit(*at_)) ++at_;
        return at_ > start;
    }

    bool skip_number() {
        const char* start = at_;
        if (next_is('-')) ++at_;
        const bool has_zero = next_is('0');
        if (has_zero ? (++at_, false) : !digits()) return false;
        if (next_is('.') && (++at_, !digits())) return false;
        if (next_is('e') || next_is('E')) {
            ++at_;
            if (next_is('+') || next_is('-')) ++at_;
            if (!digits()) return false;
        }
        return static_cast<size_t>(at_ - start) <= kMaxNumber;
    }

    const char* at_;
    const char* end_;
};

bool read_line(Line line, IdLines& read, std::string_view ids_field, const std::optional<std::string>& request_id_field) {
    std::array<std::string_view, kMaxFields> keys;
    size_t num_keys = 0;
    bool has_ids = false, has_request_id = !request_id_field;
    std::string_view request_id;
    if (!line.take('{')) return false;
    do {
        std::string_view key;
        if (num_keys == kMaxFields || !line.string(key) || !line.take(':')) return false;
        if (std::find(keys.begin(), keys.begin() + num_keys, key) != keys.begin() + num_keys) return false;
        keys[num_keys++] = key;
        const bool is_ids = key == ids_field, is_request_id = request_id_field && key == *request_id_field;
        if (is_ids && is_request_id) return false;
        if (is_ids ? !line.token_ids(read.token_ids) : is_request_id ? !line.request_id(request_id) : !line.skip_value()) return false;
        has_ids |= is_ids;
        has_request_id |= is_request_id;
    } while (line.take(','));
    if (!line.take('}') || !line.is_at_end() || !has_ids || !has_request_id) return false;
    read.offsets.push_back(static_cast<int64_t>(read.token_ids.size()));
    if (request_id_field) read.request_ids.push_back(request_id);
    return true;
}

}  // namespace

IdLines read_id_lines(const std::vector<std::string_view>& lines, std::string_view ids_field,
                      const std::optional<std::string>& request_id_field) {
    IdLines read;
    for (const std::string_view line : lines) {
        if (read_line(Line(line), read, ids_field, request_id_field)) continue;
        read.token_ids.resize(static_cast<size_t>(read.offsets.back()));  // what the line gave before it turned out not to be plain
        break;
    }
    return read;
}

}  // namespace tensorrt_llm_ext
