# dt - builds the programs and runs the tests. Needs cc and make; detects nothing.
#
#   make          builds train_gpt, demo and the ladder of examples into build/
#   make demo     builds and runs the demonstration: every layout against one rank
#   make test     runs all tests and a sample of 3 planted mistakes; last line "N passed, N failed, N skipped"
#                 (DEPS=no installs nothing)
#   make mutants  plants every mistake of tests/mutants: each must make its test fail
#   make bench    runs every benchmark beside its peers (OpenBLAS, PyTorch, Open MPI), where they are installed
#   make asan     runs the test programs and train_gpt under the address, leak and undefined-behaviour sanitizers;
#                 ubsan and tsan likewise; T=sanitized: only train_gpt, demo and the ladder
#   make faults   runs the full fault campaigns: killed, stopped, deadlocked and late ranks, networks, disks, power,
#                 and the memory promises (about 25 minutes)
#   make fuzz SECONDS=60   runs every fuzz target for that long; needs clang with libFuzzer
#   make CUDA=1   links dt_kernels.cu, compiled by nvcc; NCCL=1: one GPU for each rank; ARCH=90a: for that GPU only
#   make MPI=1    builds with mpicc for ranks that mpirun starts (MPICC=mpicc.mpich: another compiler)
#   make BLAS=1   uses OpenBLAS for matrix products; make OMP=1 uses threads inside a rank
#
# Your own program needs no Makefile: cc -O3 train.c -lm -lpthread

.DEFAULT_GOAL := all

CFLAGS    ?= -O3 -Wall -Wextra
TFLAGS    ?= -O1 -g1 -Wall -Wextra
CXXFLAGS  ?= -std=c++17 -O1 -g1 -Wall -Wextra
LDLIBS    ?= -lm -lpthread
NVCC      ?= nvcc
MPICC     ?= mpicc
NVCCFLAGS ?= -O3
B         ?= build
CUDA_HOME ?= /usr/local/cuda

ifeq ($(BLAS),1)
CFLAGS += -DDT_USE_CBLAS
LDLIBS += -lopenblas
endif
ifeq ($(OMP),1)
CFLAGS += -DDT_USE_OMP -fopenmp
TFLAGS += -DDT_USE_OMP -fopenmp
endif

ifeq ($(MPI),1)
override CFLAGS += -DDT_USE_MPI
override TFLAGS += -DDT_USE_MPI
CC      = $(MPICC)
endif

COMPILE = $(CC) $(CFLAGS)
TESTING = $(CC) $(TFLAGS)
UNUSED  = -Wno-unused-function
ifeq ($(CUDA),1)
# nvcc compiles dt_kernels.cu, and the linker finds it by itself. Machine code for each architecture, and PTX of the newest one, which later GPUs compile at start.
ARCH      ?= 80 90a 100
NVCCFLAGS += $(foreach a,$(ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
             -gencode arch=compute_$(lastword $(ARCH)),code=compute_$(lastword $(ARCH))
NVCCFLAGS += $(if $(filter 1,$(NCCL)),,-DDT_NO_NCCL)
KERNELS = $(B)/dt_kernels.o
LDLIBS += -L$(CUDA_HOME)/lib64 -lcublasLt $(if $(filter 1,$(NCCL)),-lnccl) -lcudart -lstdc++
endif

FLAGS    = $(NVCCFLAGS) $(COMPILE) $(KFLAGS) $(TESTING) $(CXX) $(CXXFLAGS) $(RACES) $(LDLIBS)
HEADERS  = $(wildcard dt_*.h examples/*.h tests/*/*.h)
EXAMPLES = $(patsubst examples/%.c,$(B)/%,$(wildcard examples/*.c)) \
           $(if $(KERNELS),$(patsubst examples/%.cu,$(B)/%,$(wildcard examples/*.cu)))
BENCHES  = $(patsubst tests/bench/%.c,$(B)/%,$(wildcard tests/bench/*.c))
TESTS    = $(patsubst %,$(B)/%,$(basename $(notdir $(wildcard tests/*/test_*.c tests/*/test_*.cc))))
vpath %.c  tests/tensor tests/comm tests/parallel tests/zero tests/cuda tests/programs tests/faults
vpath %.cc tests/cuda
RACES    = -fsanitize=thread --param tsan-distinguish-volatile=1 -fno-inline -fno-thread-jumps -fno-builtin-memcpy \
           -fno-builtin-memset

# Compile the implementation once. Examples and benchmarks include declarations and link with implementation.o and
# kernels.o; the tests in PUBLIC use only public functions, and link with tests_implementation.o and tests_kernels.o. The
# other tests use private functions, so they compile the implementation themselves, except the CPU kernels, which take
# most of the compile time; helpers that only the kernels use are then unused. The tests in WHOLE use private functions
# of the kernels too. SHARE=no compiles everything in each test.
IMPLEMENTED = -DDT_TENSOR_IMPL -DDT__TENSOR_TABLE -DDT_COMM_IMPL -DDT_PARALLEL_IMPL -DDT_ZERO_IMPL
OBJECTS     = $(B)/implementation.o $(B)/kernels.o $(KERNELS)
WHOLE       = $(B)/test_kernels $(B)/test_cuda_shim $(B)/test_fake_cuda $(B)/test_fake_kernels
PUBLIC      = $(if $(filter no,$(SHARE)),,$(patsubst %,$(B)/test_%,checkpoint_kills many_ranks memory models plan schedule \
                seeds overlap tokenizer trace file_safety))
SHARING     = $(if $(filter no,$(SHARE)),,$(filter-out $(WHOLE) $(PUBLIC),$(TESTS)))
HELPERS     = $(patsubst %,$(B)/%,net_rank packets power mpi_ranks mpi_mismatch mpi_ps)
$(PUBLIC): $(B)/tests_implementation.o $(B)/tests_kernels.o
$(SHARING) $(HELPERS): $(B)/tests_kernels.o
# These take longer to compile than to run, so they are not optimised, unless TFLAGS are given.
QUICK = $(HELPERS) \
    $(patsubst %,$(B)/test_%,account attack checkpoint_faults checkpoint_kills comm_procs comm_started faults file_safety files fuzz gpt grad_dtype groups \
          io_thread launch_env layers lora many_ranks memory mismatch misuse models moe muon nan onebit ops overlap parallel pipe placements plan \
          precision ps ps_blocks ps_save rendezvous replicas schedule seeds tensor tokenizer trace)
ifeq ($(origin TFLAGS),file)
$(QUICK): private TFLAGS := $(patsubst -O1,-O0,$(TFLAGS))
endif
ifeq ($(origin CXXFLAGS),file)
$(B)/test_cuda_blas: private CXXFLAGS := $(patsubst -O1,-O0,$(CXXFLAGS))
endif
$(B)/test_fake_cuda: OWN = -isystem $(CUDA_HOME)/include
$(B)/test_fake_kernels: OWN = -isystem $(CUDA_HOME)/include $(B)/fake_cuda.o
$(B)/test_fake_kernels: $(B)/fake_cuda.o
$(B)/test_fuzz: $(wildcard tests/fuzz/*.[ch]) examples/train_gpt.c
$(SHARING) $(HELPERS): OWN = -DDT__TENSOR_TABLE $(UNUSED) $(B)/tests_kernels.o
$(PUBLIC): OWN = $(IMPLEMENTED) $(B)/tests_implementation.o $(B)/tests_kernels.o
# KFLAGS: kernels.o, which demo and the ladder link, is not sanitized. The tests, and the train_gpt of test_sanitized.sh,
# link tests_kernels.o, which is.
SANITIZE = $(MAKE) --no-print-directory B=build-$@ TFLAGS="-O1 -g -Wall -Wextra $(1)" \
           CFLAGS="-O1 -g1 -Wall -Wextra $(1)" KFLAGS="-O2 -fno-sanitize=all" CXXFLAGS="-std=c++17 -O1 -g $(1)" sanitized

.PHONY: all demo test mutants tests asan tsan ubsan sanitized faults fuzz bench clean FORCE
all: $(EXAMPLES)
tests: $(TESTS)
demo: # compile both halves of the implementation at the same time
	$(MAKE) --no-print-directory $(if $(findstring j,$(firstword -$(MAKEFLAGS))),,-j2) $(B)/demo
	$(B)/demo

test:
	@B=$(B) SAMPLE=3 tests/run.sh

mutants:
	@tests/mutants/run.sh && tests/programs/test_headers.sh planted

asan:  ; @$(call SANITIZE,-fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined)
ubsan: ; @$(call SANITIZE,-fsanitize=undefined -fno-sanitize-recover=undefined)
tsan:  ; @$(call SANITIZE,-fsanitize=thread)
comma := ,
sanitized:
	@B=$(B) CASES=all tests/run.sh $(or $(T),programs)

bench: $(BENCHES)
	@for p in $^; do echo "== $$p"; $$p || exit 1; done

# Fuzzing: each target starts from its corpus and runs for SECONDS. New inputs and crashes stay in build/fuzz.
SECONDS ?= 60
FUZZERS  = $(patsubst tests/fuzz/%.c,$(B)/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
fuzz: $(FUZZERS)
	@for t in $(FUZZERS); do \
	    n=$${t##*/fuzz_}; mkdir -p $(B)/fuzz/found_$$n; echo "$$n: $(SECONDS) s"; \
	    case $$n in rendezvous|packets|manifest) len=1200 ;; *) len=512 ;; esac; \
	    $$t -max_total_time=$(SECONDS) -max_len=$$len -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
	        -artifact_prefix=$(B)/fuzz/$$n- $(B)/fuzz/found_$$n tests/fuzz/corpus/$$n >$(B)/fuzz/$$n.log 2>&1 || \
	        { tail -n 30 $(B)/fuzz/$$n.log; exit 1; }; \
	    grep -E 'number_of_executed_units|DONE' $(B)/fuzz/$$n.log; done

# The full campaigns. B=build-asan runs the programs of that folder.
faults: $(B)/test_faults $(B)/test_mismatch $(B)/test_attack $(B)/test_fuzz $(B)/test_checkpoint_faults \
        $(B)/test_checkpoint_kills $(B)/test_ps_save $(B)/test_offload $(B)/test_memory $(B)/test_cuda $(B)/test_cuda_races \
        $(B)/test_matrix_gpu $(B)/test_matrix $(B)/test_comm $(B)/test_comm_ops $(B)/test_tcp $(B)/train_gpt
	@B=$(B) tests/faults/run.sh

clean:
	rm -rf build build-asan build-ubsan build-tsan

# Rebuild when the compiler or its flags change.
$(B)/flags: FORCE
	@mkdir -p $(B); echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' >$@

$(B)/dt_kernels.o: dt_kernels.cu $(HEADERS) $(B)/flags
	$(NVCC) $(NVCCFLAGS) -c $< -o $@
$(B)/fuzz/fuzz_config: examples/train_gpt.c
$(B)/fuzz/%: tests/fuzz/%.c tests/fuzz/fuzz.h $(HEADERS)
	@mkdir -p $(B)/fuzz
	clang -O1 -g -DFUZZ_ENGINE -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -I. $< -o $@ $(LDLIBS)
# The emulated CUDA runtime. Without the CUDA toolkit's headers it is empty.
$(B)/fake_cuda.o: tests/cuda/fake_cuda.c $(wildcard tests/cuda/fake_*.h) $(B)/flags
	$(CC) $(TFLAGS) -O2 -I. -isystem $(CUDA_HOME)/include -c $< -o $@
# dt_kernels.cu compiled for the CPU; the emulated runtime runs its kernel launches in streams.
ifneq ($(wildcard $(CUDA_HOME)/include/cublasLt.h),)
EMULATED = $(B)/gpu_kernels.o $(B)/fake_cuda.o
GPU_TESTS = $(B)/test_matrix_gpu $(B)/test_nccl
$(GPU_TESTS): $(EMULATED)
$(GPU_TESTS): OWN += -isystem $(CUDA_HOME)/include $(EMULATED) -lstdc++
$(B)/test_matrix_gpu: tests/programs/test_matrix.c
$(B)/test_cuda_blas: $(B)/fake_cuda.o
$(B)/test_cuda_blas: OWN += -isystem $(CUDA_HOME)/include $(B)/fake_cuda.o
endif
$(B)/gpu_kernels.o: dt_kernels.cu tests/cuda/cuda_on_cpu.h $(HEADERS) $(B)/flags
	$(CXX) -std=c++17 -O1 -g1 -Wall -Wextra -Wno-unknown-pragmas -x c++ -DDTC_QUEUED -DDT_CUBLASLT -DDT_NCCL \
	    -DDT_NCCL_F32_WINDOW=96 -DDT_NCCL_MIN_BYTES=16 -I. -isystem $(CUDA_HOME)/include -include nccl.h \
	    -include tests/cuda/cuda_on_cpu.h -c $< -o $@
$(B)/kernels.o: tests/support/implementation.c $(HEADERS) $(B)/flags
	$(COMPILE) $(KFLAGS) -DKERNELS -I. -c $< -o $@
$(B)/tests_kernels.o: tests/support/implementation.c $(HEADERS) $(B)/flags
	$(TESTING) -DKERNELS -I. -c $< -o $@
$(B)/tests_implementation.o: tests/support/implementation.c $(HEADERS) $(B)/flags
	$(TESTING) $(UNUSED) -I. -c $< -o $@
$(B)/implementation.o: tests/support/implementation.c $(HEADERS) $(B)/flags
	$(COMPILE) $(UNUSED) -I. -c $< -o $@
$(B)/%: examples/%.c $(HEADERS) $(OBJECTS) $(B)/flags
	$(COMPILE) $(IMPLEMENTED) -I. $< $(OBJECTS) -o $@ $(LDLIBS)
$(B)/%: examples/%.cu $(HEADERS) $(OBJECTS) $(B)/flags
	$(NVCC) $(NVCCFLAGS) $(IMPLEMENTED) -I. $< $(OBJECTS) -o $@ $(LDLIBS)
$(B)/%: tests/bench/%.c $(HEADERS) $(OBJECTS) $(B)/flags
	$(COMPILE) $(IMPLEMENTED) -I. $< $(OBJECTS) -o $@ $(LDLIBS)
$(B)/test_fake_cuda: tests/cuda/fake_cuda.c
$(B)/%: %.c $(HEADERS) $(KERNELS) $(B)/flags
	$(TESTING) $(OWN) -I. $< $(KERNELS) -o $@ $(LDLIBS)
$(B)/%: %.cc $(HEADERS) $(wildcard dt_*.cu) $(B)/flags
	$(CXX) $(CXXFLAGS) $(OWN) -I. $< -o $@ $(LDLIBS)
# The same cases on a GPU. Without CUDA=1 they run on the emulated runtime, which shows that the host waits for the device.
$(B)/%_on_gpu: %.cc $(HEADERS) $(or $(KERNELS),$(EMULATED)) $(B)/flags
	$(CXX) $(CXXFLAGS) -DCUDA_ON_GPU -isystem $(CUDA_HOME)/include -I. -c $< -o $@.o
	$(CXX) $(CXXFLAGS) $@.o $(or $(KERNELS),$(EMULATED)) -o $@ $(LDLIBS)
# The compiler reports every memory access of these kernels to tests/cuda/cuda_races.cc, a race detector of our own.
$(B)/test_cuda_races: tests/cuda/test_cuda_races.cc $(HEADERS) $(wildcard dt_*.cu) $(B)/cuda_races.o $(B)/tests_kernels.o \
    $(B)/flags
	$(CXX) $(filter-out -fsanitize%,$(CXXFLAGS)) -DDT__TENSOR_TABLE $(UNUSED) $(RACES) -I. -c $< -o $@.o
	$(CXX) $(filter-out -fsanitize=thread,$(CXXFLAGS)) $@.o $(B)/cuda_races.o $(B)/tests_kernels.o \
	    -Wl,--wrap=memcpy,--wrap=memset -o $@ $(LDLIBS)
$(B)/cuda_races.o: tests/cuda/cuda_races.cc tests/cuda/cuda_on_cpu.h $(B)/flags
	$(CXX) $(filter-out -fsanitize%,$(CXXFLAGS)) -O2 -I. -c $< -o $@
