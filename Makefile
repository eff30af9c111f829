PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-aarch64 test-tiers test-env sanitize quality style docs bench bench-gpu cards

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,demo,docs,peft]'
	touch $@

demo: $(STAMP)
	$(BIN)/hf-efficient demo --output output/demo

test: $(STAMP)
	$(BIN)/python tests/compile_kernels.py
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
		$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 40

# The native kernels' numeric tests in the tiers of ARM: cross-compiled here, run by qemu (tests/emulated.py). Without
# both they are skipped: apt-get install g++-aarch64-linux-gnu qemu-user. Left out is what takes long and adds nothing
# for another instruction set.
EMULATED := tests/kernels/test_native_linear.py tests/kernels/test_native_pages.py tests/kernels/test_emulated.py \
	tests/kernels/test_native_rounded.py tests/kernels/test_native_tables.py tests/kernels/test_recorder.py \
	tests/kernels/test_attend_ragged.py tests/formats/test_sparse_layouts.py tests/pruning/test_contextual_sparsity.py \
	tests/kernels/test_native_trellis.py tests/kernels/test_native_hadamard.py tests/kernels/test_native_packing.py \
	tests/kernels/test_native_fake_quantize.py tests/kernels/test_native_binary.py tests/kernels/test_dense_products.py
NOT_EMULATED := 2.5 or 3.5 or 9000 or spans_grow or long_prompt or compiler_that_fails or one_pool or default_dtype or \
	traces or gradients or (native_trellis and (1.5 or -3- or -5-)) or \
	(native_binary and (torch.float16 or 192 or 1300 or finite or depend or captured)) or \
	(neon_bf16 and (options or prompts or trees or page_sizes or replayed or largest or float8 or kmeans or \
	test_native_hadamard))

test-aarch64: $(STAMP)
	EMULATE_AARCH64=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q --numprocesses 2 \
		--dist loadfile --no-loadscope-reorder -k 'neon and not ($(NOT_EMULATED))' $(EMULATED) \
		|| test $$? -eq 5 -a -n "$$TESTS_SHARE"  # a share without ARM's tiers: no tests

# Layers and products of whole models as on a CPU with AVX2 alone, and on one without any kernels of ours. Numeric tests
# of the kernels run in every tier in `make test`.
TIERED := tests/layers/test_layers.py tests/layers/test_embeddings.py tests/kernels/test_packed_linear_ops.py \
	tests/kernels/test_w8a8_linear.py tests/kernels/test_replay_memory.py tests/formats/test_sparse_layouts.py

test-tiers: $(STAMP)
	for tier in avx2 torch; do HF_EFFICIENT_CPU=$$tier OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
		$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder $(TIERED) || exit 1; done

# One environment of tests/environments: built, and the contract suite run in it.
test-env: $(STAMP)
	$(BIN)/python tests/environments/run.py $(ENV)

# The native kernels' numeric tests on libraries compiled with AddressSanitizer and UndefinedBehaviorSanitizer. A
# finding ends the process and stands in its output; test_the_sanitizers_see_an_overrun, among these tests, shows that
# one is seen.
SANITIZED := tests/adversarial/test_native_indices.py tests/kernels/test_recorder.py \
	tests/kernels/test_dense_products.py tests/kernels/test_native_pages.py tests/kernels/test_native_linear.py \
	tests/formats/test_sparse_layouts.py tests/pruning/test_contextual_sparsity.py \
	tests/kernels/test_native_rounded.py tests/kernels/test_native_tables.py tests/kernels/test_attend_ragged.py \
	tests/kernels/test_native_trellis.py tests/kernels/test_native_hadamard.py tests/kernels/test_native_packing.py \
	tests/kernels/test_native_fake_quantize.py tests/kernels/test_native_binary.py
SANITIZED_CASES := native_indices or test_operators or dense_products or the_largest or separate_ones or \
	(replayed and gpt2) or (formats_and_heads and 80-48) or test_options or page_sizes or many_queries or \
	test_prompts or test_trees or appended or nobody_looks_up or products_and_inverses or test_inputs or test_kernel or \
	of_one_input or exactly_the_chosen or native_rounded or native_tables or attend_ragged or \
	native_trellis or native_hadamard or native_packing or native_fake_quantize or native_binary
# Those between the narrowest and the widest of the same vectors; ARM's run in an emulator.
UNSANITIZED_TIERS := avx512 or vnni or neon
# Nor what the same code does for other bits and queries in float16, and rows that take long. Compiling is most of the
# time: on AVX2 codes of 3 and 4 bits stand for the others, on the widest vectors all are compiled.
UNSANITIZED_CASES := (native_trellis and (2.5 or -3- or 3.5 or 9000)) or (native_trellis and avx2 and (1.5 or -5-)) or \
	(native_linear and (avx2-2 or avx2-8)) or (native_tables and avx2 and (kmeans-2 or fp4)) or \
	(formats_and_heads and torch.float16)
# Accesses are checked in functions, not in place: the same checks, compiled in half the time.
SANITIZER := g++ --param asan-instrumentation-with-call-threshold=0

sanitize: $(STAMP)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 CXX="$(SANITIZER)" \
	HF_EFFICIENT_SANITIZE=address,undefined \
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --capture=sys --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder --timeout 900 $(SANITIZED) \
		-k '($(SANITIZED_CASES)) and not ($(UNSANITIZED_TIERS)) and not ($(UNSANITIZED_CASES))'

# vermin: the oldest Python. "long" is a method of tensors, not Python 2's type.
quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vermin -q -t=3.10- --violations --exclude long hf_efficient integrations kernels
	$(BIN)/python tests/import_graph.py
	$(BIN)/python -m pytest -q tests/test_layout.py

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python docs/figures.py
	$(BIN)/zensical build -f mkdocs.yml

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_linear.py
	$(BIN)/python benchmarks/cpu_attention.py
	$(BIN)/python benchmarks/speculation.py
	$(BIN)/python benchmarks/quality.py --missing --output output/quality.json
	$(BIN)/hf-efficient demo --output output/demo
	cp output/demo/report.json benchmarks/results/demo_cpu.json

bench-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/speculation_gpu.py

cards: $(STAMP)
	$(BIN)/hf-efficient demo --output output/demo
	cp output/demo/model_card.md model_cards/SmolLM2-135M-Instruct-int4-group-64.md
	$(BIN)/python benchmarks/cards.py
