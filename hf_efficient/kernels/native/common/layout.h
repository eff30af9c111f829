// What the library says of the structures that Python fills: kernels/native/structs.py compares it with its own.

#pragma once
#include <cstddef>
#include <cstdint>

struct LayoutRow {
    const char *name;      // "Struct" or "Struct.field"; null behind the last row
    int64_t offset, size;  // bytes
};

// FIELDS(Struct, a, b, ...): a row for each field, up to 85 of them. EXPAND scans the macro again for each further field.
#define PARENTHESES ()
#define EXPAND(...) EXPAND3(EXPAND3(EXPAND3(EXPAND3(__VA_ARGS__))))
#define EXPAND3(...) EXPAND2(EXPAND2(EXPAND2(EXPAND2(__VA_ARGS__))))
#define EXPAND2(...) EXPAND1(EXPAND1(EXPAND1(EXPAND1(__VA_ARGS__))))
#define EXPAND1(...) __VA_ARGS__
#define FIELDS(type, ...) __VA_OPT__(EXPAND(FIELD(type, __VA_ARGS__)))
#define FIELD(type, name, ...) {#type "." #name, offsetof(type, name), sizeof(type::name)}, __VA_OPT__(FIELD_AGAIN PARENTHESES(type, __VA_ARGS__))
#define FIELD_AGAIN() FIELD

#define LAYOUT(type, ...) {#type, 0, sizeof(type)}, FIELDS(type, __VA_ARGS__)
#define EXPORT_LAYOUTS(...) \
    extern "C" const LayoutRow *hf_layouts() { \
        static const LayoutRow rows[] = {__VA_ARGS__ {nullptr, 0, 0}}; \
        return rows; \
    }
