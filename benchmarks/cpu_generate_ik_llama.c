/* ik_llama.cpp (https://github.com/ikawrakow/ik_llama.cpp) for cpu_generate_engines.py: one sequence, greedy.

   cmake -B build -DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF && cmake --build build --target llama
   gcc -O2 -shared -fPIC -Iinclude -Iggml/include cpu_generate_ik_llama.c -o libik.so -Lbuild/src -lllama \
       -Lbuild/ggml/src -lggml -Wl,-rpath,$PWD/build/src:$PWD/build/ggml/src
*/
#include <stdbool.h>
#include <stdio.h>
#include <time.h>
#include "llama.h"

static struct llama_model *model;
static struct llama_context *context;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* repack: weights are interleaved while they are loaded, and not mapped. Returns 0, or 1 where that failed. */
int ik_open(const char *path, int threads, int positions, int repack) {
    llama_backend_init();
    struct llama_model_params of_model = llama_model_default_params();
    of_model.use_mmap = !repack;
    of_model.repack_tensors = repack;
    model = llama_model_load_from_file(path, of_model);
    if (!model) return 1;
    struct llama_context_params of_context = llama_context_default_params();
    of_context.n_ctx = of_context.n_batch = positions;
    of_context.flash_attn = true;
    context = llama_init_from_model(model, of_context);
    if (!context) return 1;
    llama_set_n_threads(context, threads, threads);
    return 0;
}

static llama_token best(void) {
    const float *logits = llama_get_logits_ith(context, -1);
    int at = 0;
    for (int i = 1, n = llama_n_vocab(model); i < n; i++)
        if (logits[i] > logits[at]) at = i;
    return at;
}

/* Writes `number` tokens behind `ids`. seconds: to the first of them, and of the others. Returns 1 on an error. */
int ik_run(llama_token *ids, int count, int number, llama_token *tokens, double *seconds) {
    double start = now();
    llama_kv_cache_clear(context);
    if (llama_decode(context, llama_batch_get_one(ids, count, 0, 0))) return 1;
    tokens[0] = best();
    seconds[0] = now() - start;
    for (int i = 1; i < number; i++) {
        if (llama_decode(context, llama_batch_get_one(tokens + i - 1, 1, count + i - 1, 0))) return 1;
        tokens[i] = best();
    }
    seconds[1] = now() - start - seconds[0];
    return 0;
}
