/* Steps of llama.cpp in this process, as peers.py asks for them.
 *
 *   cc -O2 -I LLAMA/include -I LLAMA/ggml/include peer_llamacpp.c -lllama -lggml -lggml-base -o peer_llamacpp
 *   ./peer_llamacpp MODEL.gguf THREADS [FOLDER_OF_BACKENDS]
 *
 * Time is that of llama_decode() and of reading its logits. Prompts are one batch in micro-batches of 512 tokens, flash attention is left to
 * llama.cpp, as in its own llama-bench. */
#include <ggml-backend.h>
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { FIRST_ID = 5, NUM_IDS = 32, MAX_SEQUENCES = 16, MAX_PROMPT = 4096, MICRO_BATCH = 512 };

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void quiet(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level >= GGML_LOG_LEVEL_WARN) fputs(text, stderr);
}

static struct llama_context *make_context(struct llama_model *model, int sequences, int tokens, int threads) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = sequences * tokens;
    params.n_batch = MAX_PROMPT;
    params.n_ubatch = MICRO_BATCH;
    params.n_seq_max = sequences;
    params.n_threads = params.n_threads_batch = threads;
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context) exit(2);
    return context;
}

static void put(struct llama_batch *batch, llama_token token, int position, int sequence, bool wanted) {
    int i = batch->n_tokens++;
    batch->token[i] = token;
    batch->pos[i] = position;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = sequence;
    batch->logits[i] = wanted;
}

static void put_prompt(struct llama_batch *batch, int length, int sequence) {
    batch->n_tokens = 0;
    for (int i = 0; i < length; i++) put(batch, FIRST_ID + (i * 7) % NUM_IDS, i, sequence, i == length - 1);
}

static void step(struct llama_context *context, struct llama_batch batch, bool told) {
    double wall = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    if (llama_decode(context, batch)) exit(3);
    llama_synchronize(context);
    volatile float *logits = llama_get_logits_ith(context, -1);
    (void)logits[0];
    if (told) printf("%.6f/%.6f ", now(CLOCK_MONOTONIC) - wall, now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
}

static void prefill(struct llama_context *context, struct llama_batch batch, int length) {
    llama_memory_clear(llama_get_memory(context), true);
    put_prompt(&batch, length, 0);
    step(context, batch, true);
}

static void decode(struct llama_context *context, struct llama_batch batch, int sequences, int length, int count) {
    llama_memory_t memory = llama_get_memory(context);
    llama_memory_clear(memory, true);
    put_prompt(&batch, length - 1, 0);
    step(context, batch, false);
    for (int i = 1; i < sequences; i++) llama_memory_seq_cp(memory, 0, i, -1, -1);
    for (int turn = -2; turn < count; turn++) { /* two that warm up */
        batch.n_tokens = 0;
        for (int i = 0; i < sequences; i++) put(&batch, FIRST_ID + i % NUM_IDS, length - 1, i, true);
        step(context, batch, turn >= 0);
        for (int i = 0; i < sequences; i++) llama_memory_seq_rm(memory, i, length - 1, -1);
    }
}

int main(int argc, char **argv) {
    if (argc < 3) return 1;
    int threads = atoi(argv[2]);
    llama_log_set(quiet, NULL);
    if (argc > 3) ggml_backend_load_all_from_path(argv[3]);
    else ggml_backend_load_all();
    llama_backend_init();
    fprintf(stderr, "%s\n", llama_print_system_info());
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 2;
    struct llama_context *one = make_context(model, 1, MAX_PROMPT, threads), *many = make_context(model, MAX_SEQUENCES, MICRO_BATCH, threads);
    struct llama_batch batch = llama_batch_init(MAX_PROMPT, 0, 1);
    char line[256];
    int a, b, c;
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "prefill %d", &a) == 1) prefill(one, batch, a);
        else if (sscanf(line, "decode %d %d %d", &a, &b, &c) == 3) decode(a == 1 ? one : many, batch, a, b, c);
        else return 4;
        putchar('\n');
    }
    return 0;
}
