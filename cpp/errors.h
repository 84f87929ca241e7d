// Errors: what happened, what was expected, what was found and what to do; bindings.cpp maps each kind to its Python class.
#pragma once

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace tensorrt_llm_ext {

enum class Kind {
    backend,   // a library beneath refused a call or failed
    deadline,  // something did not happen in time
    plan,      // a batch that cannot be packed, or verbs out of order
    closed,    // closed, or failed earlier
    memory,    // more bytes than there are
    call,      // a call given to Stream::run raised: `cause` holds what it raised
};

class Error : public std::exception {
public:
    Error(Kind kind, std::string what, std::string expected, std::string found, std::string fix)
        : kind(kind), sentence(std::move(what)), expected(std::move(expected)), found(std::move(found)), fix(std::move(fix)) {}

    const char* what() const noexcept override { return sentence.c_str(); }

    Kind kind;
    std::string sentence, expected, found, fix;
    std::shared_ptr<void> cause;  // the exception object of another language; opaque here
};

// A number of seconds for a message: "0.05 s".
inline std::string seconds_text(double seconds) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g s", seconds);
    return text;
}

// What a session that was closed answers.
inline Error session_closed() {
    return Error(Kind::closed, "the session was closed", "an open session", "a closed one",
                 "wait for every ticket before closing the session, or open a new one");
}

}  // namespace tensorrt_llm_ext
