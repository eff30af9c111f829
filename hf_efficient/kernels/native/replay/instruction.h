// Instructions of the interpreter (replay.cpp), as kernels/replay/instructions.py makes them.

#pragma once
#include "layout.h"

enum Op : int32_t {
    COPY, NEG, ABS, RELU, SILU, GELU, GELU_TANH, TANH, SIGMOID, EXP, SQRT, RSQRT, RECIPROCAL, COS, SIN, POW,  // of a
    ADD, SUB, MUL, DIV,              // of a and b (or `beta` where there is no b); ADD and SUB take alpha * b
    MEAN, SUM,                       // of a over its last dimension
    ROWS,                            // y[i] = a[b[i]]: sizes[1] rows of a, sizes[2] int64 indices, sizes[3] bytes a row
    LINEAR,                          // sizes[1] products of a with sizes[2] rows; `weight` points to the `Product`s
    DENSE,                           // y = a @ b^T + c, all of one type: sizes[1] rows, sizes[2] columns, sizes[3] wide
    CALL,                            // linear(weight), a function of another library that returns 0 where it refuses
    RMS_NORM, ROTARY, GATED,         // several ops in one, see kernels/replay/fusion.py
    GATHER,                          // y[i][j] = a[i][b[j]]: sizes[1] rows, sizes[2] int64 indices, sizes[3] bytes each
    ARGMAX,                          // int64 y: the index of the largest element of a in its last dimension
    SOFTMAX, TOP,  // of sizes[2] rows of float a; TOP: y and int64 c are the `beta` largest of each and their indices
};

struct Operand {         // mirrored in kernels/replay/instructions.py, as Instruction is
    void *data;          // null: there is none
    int64_t strides[4];  // in elements, 0 where it is broadcast
    int64_t type;
};

struct Instruction {
    int64_t op;
    int64_t sizes[4];
    Operand y, a, b, c;
    double alpha, beta;
    const void *weight;
    void (*linear)(const void *, int64_t, const void *, int64_t, int);
};

EXPORT_LAYOUTS(LAYOUT(Operand, data, strides, type)
               LAYOUT(Instruction, op, sizes, y, a, b, c, alpha, beta, weight, linear))
