#!/usr/bin/env bash
# test_headers.sh - the headers as files: they compile with every compiler, have no global state, call libc only in
# allowed places, and their text follows the rules.
#
#   tests/programs/test_headers.sh [-C DIR] [GROUP...]     DIR: the project to check; no group: all but planted
#
#   compile    each header, in C11 and C++17 with gcc and clang: declarations alone, declarations then implementation,
#              implementation and use in two files, DT_STATIC in two files of one program; and with
#              DT_NCCL_DLOPEN
#   others     the same program under nvcc (.c and .cu) and for aarch64; with FULL=yes (make faults) optimised for aarch64,
#              dt_kernels.cu optimised and within its budgets of registers, and for a GPU without bf16
#   symbols    no writable data, no names without dt_, every declared function is defined and no other, libc only through tables
#   text       contents, tags of functions, line lengths, header lengths, function lengths, layout (.clang-format),
#              examples' use of dt__
#   guards     headers of different releases refuse each other; -ffast-math is refused
#   examples   the QUICK EXAMPLE of each header and the programs in README.md, by the build line they name, with -O0 for
#              -O3; with FULL=yes the last header's to the letter
#   planted    plants violations of these rules in a copy and expects each to be found (part of make mutants)
#
# The compilers of all groups run in parallel, the longest first; results are counted at the end. The last header
# includes the others. A compiler that has compiled the implementation in one program only parses it in the next.
self=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
[ "$1" = -C ] && { cd "$2" || exit 1; shift 2; }
ROOT=$PWD
groups=${*:-others examples symbols compile text guards}
HEADERS=${HEADERS:-dt_tensor.h dt_comm.h dt_parallel.h dt_zero.h}
CONFIGS=${CONFIGS:-gcc:c11 gcc:gnu11 clang:c11 clang:gnu11 g++:c++17 clang++:c++17}
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
passed=0 failed=0 skipped=0 n_jobs=0
export LC_ALL=C
CPUS=$(nproc 2>/dev/null || echo 2)
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}

# ---- counting, and parallel jobs ------------------------------------------------------------------------------------

skip() { echo "SKIP $1: $2"; skipped=$((skipped + 1)); }

# check LABEL FILE: passes if FILE is empty, else prints FILE as the reason
check() {
    if [ -s "$2" ]; then
        echo "FAIL $1"; head -n "${3:-8}" "$2" | sed 's/^/    /'; failed=$((failed + 1))
    else
        echo "PASS $1"; passed=$((passed + 1))
    fi
}

# job LABEL COMMAND...: runs COMMAND in the background; passes if it ends with status 0. A COMMAND that begins with
# `after` starts when all other jobs have been started, so that it keeps no processor idle.
late=()
job() {
    local label=$1 id=$n_jobs
    if [ "$2" = after ] && [ -n "$late_jobs_wait" ]; then late+=("$(printf '%q ' "$@")"); return; fi
    shift
    n_jobs=$((n_jobs + 1))
    while [ "$(jobs -rp | wc -l)" -ge "$CPUS" ]; do wait -n; done
    echo "$label" >"$T/job.$id.label"
    ( if "$@" >"$T/job.$id.log" 2>&1; then : >"$T/job.$id.log"; else echo "status $?" >>"$T/job.$id.log"; fi
      : >"$T/job.$id.end" ) &
}

# after JOB COMMAND...: waits for JOB, which was started before, then runs COMMAND
after() {
    local id=$1
    shift
    until [ -e "$T/job.$id.end" ]; do sleep 0.1; done
    "$@"
}

# starts the late jobs, waits for all jobs and checks them in order
collect() {
    local i
    late_jobs_wait=
    for ((i = 0; i < ${#late[@]}; i++)); do eval "job ${late[i]}"; done
    late=()
    wait
    for ((i = 0; i < n_jobs; i++)); do check "$(cat "$T/job.$i.label")" "$T/job.$i.log"; done
    n_jobs=0
}

have() { command -v "$1" >/dev/null; }

# ---- the programs that are compiled ---------------------------------------------------------------------------------

# Prints the source of `int PREFIX_use(void)`, which uses a function of HEADER and of each header below and returns 0.
# Compound literals and fields left zero are this program's own choice, so that C++ does not warn about them here.
use_text() { # use_text HEADER PREFIX
    local level warning
    for warning in pedantic missing-field-initializers pragmas c++20-extensions; do
        printf '#if defined(__cplusplus) && defined(__GNUC__)\n#pragma GCC diagnostic ignored "-W%s"\n#endif\n' $warning
    done
    case $1 in dt_tensor.h) level=1 ;; dt_comm.h) level=2 ;; dt_parallel.h) level=3 ;; *) level=4 ;; esac
    [ $level -ge 2 ] && cat <<END
static dt_status $2_rank(dt_ctx *ctx, void *user) {
    double *out = (double *)user, mine = 1 + dt_comm_rank(dt_world(ctx)), sum = 0;
    dt_all_reduce(dt_world(ctx), &mine, &sum, 1, DT_F64, DT_SUM);
    if (dt_comm_rank(dt_world(ctx)) == 0) *out = sum;
    return dt_error(ctx);
}
END
    cat <<END
int $2_use(void);
int $2_use(void) {
#ifdef __cplusplus
    size_t six = 6; /* sizes of any integer type */
#else
    int64_t six = 6; /* in C, -Wconversion warns about others */
#endif
    int        bad = dt_count(DT_SHAPE(six / 3, 3)) != 6 || DT_SHAPE(six / 3, 3).nd != 2;
    float      x[3] = { 1, 2, 3 };
    dt_ctx    *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1 });
    dt_tensor *w = dt_param(ctx, "w", DT_SHAPE(2, 3), DT_ONES);
    dt_tensor *y = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(1, 3), x), w, NULL);
    bad |= dt_item(dt_mse(y, y, 1)) != 0 || ((float *)y->data)[1] != 6;
    dt_ctx_free(ctx);
END
    [ $level -ge 2 ] && cat <<END
    double sum = 0;
    bad |= dt_run((dt_run_desc){ .ranks = 2 }, $2_rank, &sum) != DT_OK || sum != 3;
END
    [ $level -ge 3 ] && cat <<END
    dt_data_order order = { 10, 4, 2, 2, 0 };
    bad |= dt_data_order_sequence(order, 1, 0, 1, 0) != 2;
END
    [ $level -ge 4 ] && cat <<END
    dt_lr_desc lr = { 2, DT_LR_CONSTANT, 0, 1, 0, 0 };
    bad |= dt_lr(lr, 1) != 2;
END
    echo "    return bad;"
    echo "}"
}

write_programs() { # write_programs HEADER DIR EXT
    local h=$1 d=$2 x=$3 gnu=$'#ifndef _GNU_SOURCE\n#define _GNU_SOURCE\n#endif'
    mkdir -p "$d"
    { echo "#include \"$h\""
      echo "static inline dt_init macros(int i) { return i ? DT_NORMAL(0.5) : i > 1 ? DT_ZEROS : DT_UNIFORM(1); }"
      echo "double declared_use(void); double declared_use(void) { return macros(1).scale; }"; } >"$d/decl.$x"
    { echo "$gnu"; echo "#include \"$h\""; echo "#define DT_IMPLEMENTATION"; echo "#include \"$h\""
      use_text "$h" one; } >"$d/both.$x"
    echo "int one_use(void); int main(void) { return one_use(); }" >"$d/main.$x"
    { echo "#include \"$h\""; use_text "$h" two
      echo "int one_use(void); int main(void) { return one_use() | two_use(); }"; } >"$d/use.$x"
    { echo "$gnu"; echo "#define DT_STATIC"; echo "#define DT_IMPLEMENTATION"; echo "#include \"$h\""
      use_text "$h" a; } >"$d/a.$x"
    echo "int a_use(void); int b_use(void); int main(void) { return a_use() | b_use(); }" >"$d/ab.$x"
}

build_and_run() { # build_and_run EXE COMPILE... : compiles, links, runs
    local exe=$1
    shift
    "$@" -o "$exe" -lm -lpthread && timeout $((60 * SLOW)) "$exe"
}

# The object is kept: two_files links it with another file that uses the header.
declared_then_implemented() { # declared_then_implemented DIR EXT COMPILE...
    local d=$1 x=$2
    shift 2
    "$@" -c "$d/both.$x" -o "$d/both.o" && build_and_run "$d/both" "$@" "$d/both.o" "$d/main.$x"
}

two_files() { # two_files DIR EXT COMPILE...
    local d=$1 x=$2
    shift 2
    [ -e "$d/both.o" ] || { echo "the implementation does not compile"; return 1; }
    build_and_run "$d/two" "$@" "$d/both.o" "$d/use.$x"
}

# DT_STATIC leaves no global symbols. The second file is the same object, with b_use for a_use.
static_twice() { # static_twice DIR EXT COMPILE...
    local d=$1 x=$2 use
    shift 2
    "$@" -c "$d/a.$x" -o "$d/a.o" || return
    if nm -g --defined-only "$d/a.o" | grep -w 'dt_[A-Za-z0-9_]*'; then echo "visible in spite of DT_STATIC"; return 1; fi
    use=$(nm -g --defined-only "$d/a.o" | awk '/a_use/ { print $3 }')
    objcopy --redefine-sym "$use=${use/a_use/b_use}" "$d/a.o" "$d/b.o" &&
        build_and_run "$d/ab" "$@" "$d/a.o" "$d/b.o" "$d/ab.$x"
}

# The NCCL backend without libnccl, with DT_NCCL_DLOPEN, which needs only the headers of CUDA and NCCL. The kernels of
# dt_kernels.cu are compiled as functions of the CPU.
nccl_at_run_time() {
    local f what="g++ c++17: DT_NCCL_DLOPEN"
    [[ " $HEADERS " == *" dt_comm.h "* && " $CONFIGS " == *" g++:c++17 "* ]] && have g++ && [ -e dt_kernels.cu ] || return
    for f in cuda_runtime.h nccl.h; do
        echo "#include <$f>" | gcc -isystem "$CUDA_HOME/include" -fsyntax-only -x c - 2>/dev/null ||
            { skip "$what" "$f is not found"; return; }
    done
    job "$what" g++ -std=c++17 -Wall -Wextra -Werror -Wno-unknown-pragmas -isystem "$CUDA_HOME/include" -I"$ROOT" -DDTC_QUEUED \
        -DDT_NCCL -DDT_NCCL_DLOPEN -include nccl.h -include "${self%/*}/../cuda/cuda_on_cpu.h" -fsyntax-only -x c++ dt_kernels.cu
}

# DT_NO_KERNELS: no product is compiled, an op without a kernel says so, and what communication needs works.
no_kernels() { # no_kernels DIR EXT COMPILE...
    local d=$1 x=$2
    shift 2
    mkdir -p "$d"
    cat >"$d/none.$x" <<'END'
#define DT_IMPLEMENTATION
#define DT_NO_KERNELS
#include "dt_comm.h"
#include <stdio.h>
static dt_status rank(dt_ctx *ctx, void *user) {
    float x[3] = { 1, 2, 3 }, sum = 0;
    dt_tensor *t = dt_input(ctx, DT_F32, DT_SHAPE(3), x);
    int *wrong = (int *)user;
    if (dt_all_reduce(dt_world(ctx), x, &sum, 1, DT_F32, DT_SUM) != DT_OK || sum != 2) *wrong = 1;
    if (!dt_slice(dt_cast(t, DT_F64), 0, 1, 2)) *wrong = 2;
    if (dt_softmax(t)) *wrong = 3;
    if (dt_error(ctx) == DT_ERR_UNSUPPORTED && !strstr(dt_error_text(ctx), "kernel softmax on cpu")) *wrong = 4;
    return dt_error(ctx);
}
int main(void) {
    int wrong = 0;
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = 2;
    dt_status status = dt_run(desc, rank, &wrong);
    printf("status %s, wrong %d\n", dt_status_name(status), wrong);
    return status != DT_ERR_UNSUPPORTED || wrong;
}
END
    "$@" "$d/none.$x" -o "$d/none" -lm -lpthread && timeout $((60 * SLOW)) "$d/none" || return
    if nm "$d/none" | grep -E 'dt__(matmul|attention|adamw|softmax)_(f32|f64)'; then echo "kernels in spite of DT_NO_KERNELS"; return 1; fi
}

group_compile() {
    local config cc std x h d flags i parse twos=()
    for config in $CONFIGS; do
        cc=${config%%:*} std=${config##*:}
        if ! have "$cc"; then skip "compile with $cc" "$cc is not installed"; continue; fi
        case $std in c++*) x=cc ;; *) x=c ;; esac
        flags="-std=$std -O0 -Wall -Wextra -Wshadow -Wconversion -Wpedantic -Werror -I$ROOT"
        [[ " $HEADERS " != *" dt_comm.h "* || $std == gnu* ]] ||
            job "$cc $std dt_comm.h: DT_NO_KERNELS" no_kernels "$T/none.$cc.$std" $x $cc $flags
        for h in $HEADERS; do
            d=$T/$cc.$std.$h
            write_programs "$h" "$d" $x
            job "$cc $std $h: declarations" $cc $flags -c "$d/decl.$x" -o "$d/decl.o"
            [ "$h" = "${HEADERS##* }" ] || [[ $cc:$std == gcc:c11 || $cc:$std == clang++:c++17 ]] || continue
            parse=("$cc" $flags -fsyntax-only)
            # the gnu standards need no _GNU_SOURCE, even after a header of libc
            [[ $std != gnu* ]] || sed -i '1,3c\#include <stdio.h>' "$d/both.$x" "$d/a.$x"
            # gnu standards are only compiled; for single headers with gcc, group examples and clang++ build the programs
            if [[ $std == gnu* ]] || { [ $cc = gcc ] && [ "$h" != "${HEADERS##* }" ] && have clang++; }; then
                job "$cc $std $h: declarations, then implementation" "${parse[@]}" "$d/both.$x"
                [[ $std == gnu* ]] || job "$cc $std $h: DT_STATIC" "${parse[@]}" "$d/a.$x"
                continue
            fi
            job "$cc $std $h: declarations, then implementation" declared_then_implemented "$d" $x $cc $flags
            twos+=("$cc $std $h: implementation and use in two files" $((n_jobs - 1)) "$d" $x "$cc $flags")
            # clang and clang++ build both files, where they are among the compilers
            if [[ $cc == g* && $CONFIGS == *clang* ]] && have clang++; then job "$cc $std $h: DT_STATIC" "${parse[@]}" "$d/a.$x"
            else job "$cc $std $h: DT_STATIC in two files" static_twice "$d" $x $cc $flags; fi
        done
    done
    nccl_at_run_time
    # DT_IMPLEMENTATION is defined for every include, in both orders
    { echo "#define _GNU_SOURCE"; echo "#define DT_IMPLEMENTATION"
      for h in $HEADERS; do echo "#include \"$h\""; done
      for h in $HEADERS; do echo "#include \"$h\""; done; use_text "${HEADERS##* }" one
      echo "int main(void) { return one_use(); }"; } >"$T/each.c"
    cc=gcc
    have clang && cc=clang      # the faster compiler
    job "$cc: all headers one after another, twice, in one file" build_and_run "$T/each" $cc -O0 -Wall -Wextra -Werror -I"$ROOT" "$T/each.c"
    for ((i = 0; i < ${#twos[@]}; i += 5)); do
        job "${twos[i]}" after "${twos[i + 1]}" two_files "${twos[i + 2]}" "${twos[i + 3]}" ${twos[i + 4]}
    done
}

# ---- other compilers ------------------------------------------------------------------------------------------------

on_aarch64() { # on_aarch64 DIR EMULATOR
    aarch64-linux-gnu-gcc -std=c11 ${FULL:+-O2} -static -Wall -Wextra -Wpedantic -Werror -I"$ROOT" "$1/both.c" "$1/main.c" \
        -o "$1/both" -lm -lpthread && { [ -z "$2" ] || timeout $((100 * SLOW)) $2 "$1/both"; }
}

group_others() {
    local h d q libs last=${HEADERS##* } kernels at=0 line
    if have aarch64-linux-gnu-gcc; then
        q=; for q in qemu-aarch64 qemu-aarch64-static; do have $q && break; q=; done
        [ -n "$q" ] || skip "running for aarch64" "qemu-user is not installed; it is only compiled"
        for h in $(tac -s ' ' <<<"$HEADERS "); do
            d=$T/aarch64.$h line="aarch64 $h: declarations, then implementation"
            write_programs "$h" "$d" c
            if [ $h = $last ]; then job "$line" on_aarch64 "$d" $q
            else job "$line" aarch64-linux-gnu-gcc -std=c11 -Wall -Wextra -Wpedantic -Werror -I"$ROOT" -fsyntax-only "$d/both.c"; fi
        done
    else
        skip "aarch64" "aarch64-linux-gnu-gcc is not installed"
    fi
    if have nvcc; then
        if [ -e dt_kernels.cu ]; then
            kernels=$T/kernels.o
            if [ -n "$FULL" ]; then job "nvcc: dt_kernels.cu within its budgets" tests/cuda/budget.sh -o "$kernels" 90a
            else job "nvcc: dt_kernels.cu" nvcc -Xcicc -O0 -Xptxas -O0 -arch=sm_90a -Xcompiler -Wall,-Wextra \
                -Werror all-warnings -c dt_kernels.cu -o "$kernels"; fi
            at=$((n_jobs - 1)) KERNELS_AT=$at libs="-lcublasLt -lnccl"
            [ -z "$FULL" ] || job "nvcc: dt_kernels.cu for a GPU without bf16" nvcc -arch=compute_75 -I"$ROOT" -ptx dt_kernels.cu -o "$T/75.ptx"
        else
            skip "nvcc with CUDA" "dt_kernels.cu is not there"
        fi
        if [ -n "$kernels" ] && [ -e examples/15_own_kernel.cu ]; then
            job "nvcc: examples/15_own_kernel.cu" after $at build_and_run "$T/own_kernel" nvcc -O0 -arch=sm_90a -Xcompiler \
                -Wall,-Wextra,-Wno-missing-field-initializers -Werror all-warnings examples/15_own_kernel.cu $kernels -lcublasLt -lnccl
        fi
        for h in $HEADERS; do
            for x in c cu; do
                [ $x = c ] || [ $h = $last ] || continue
                d=$T/nvcc.$x.$h
                write_programs "$h" "$d" $x
                line=(nvcc -O0 -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers -Werror all-warnings -I"$ROOT")
                if [ $h = $last ]; then
                    job "nvcc .$x $h: declarations, then implementation" after $at build_and_run "$d/both" \
                        "${line[@]}" "$d/both.$x" "$d/main.$x" $kernels $libs
                else
                    job "nvcc .$x $h: declarations, then implementation" \
                        "${line[@]}" -Xcompiler -fsyntax-only -c "$d/both.$x" -o "$d/both.o"
                fi
            done
        done
    else
        skip "nvcc" "nvcc is not installed, and no Debian package brings it"
    fi
}

# ---- symbols --------------------------------------------------------------------------------------------------------

# Functions of libc that no part may use: they end the program, print, or keep state of the process.
NEVER='exit abort _exit _Exit quick_exit at_quick_exit atexit printf vprintf puts putchar fprintf vfprintf dprintf vdprintf
       perror signal sigaction sigprocmask pthread_sigmask getenv setenv putenv setlocale __assert_fail rand srand random
       strtok localtime gmtime longjmp _longjmp siglongjmp system popen fork vfork execve __printf_chk __fprintf_chk'
# Functions that only the default tables may use: dt__host_* and dt__io_*.
TABLES='malloc calloc realloc free posix_memalign aligned_alloc memalign valloc strdup strndup asprintf vasprintf mmap mmap64
        munmap open open64 openat creat read write writev pread pwrite pread64 pwrite64 fsync fdatasync rename close fstat
        fstat64 __fxstat __fxstat64 stat stat64 lstat lseek lseek64 unlink unlinkat rmdir mkdir opendir fdopendir readdir fstatat getrlimit ftruncate ftruncate64 fopen fopen64 fdopen fclose fread fwrite fputs fputc
        putc fflush getline fgets fseek ftell clock_gettime gettimeofday time clock nanosleep clock_nanosleep sched_yield
        usleep sleep poll select madvise sync_file_range posix_fadvise posix_fadvise64'
# Functions that dt__tcp_* may use too. The job's token comes from the environment or from a file: dt__tcp_key,
# dt__tcp_token_file.
SOCKETS='socket bind listen accept connect send recv sendmsg setsockopt getsockopt getsockname poll close fcntl fcntl64
         inet_pton shutdown sendto recvfrom recvmsg getaddrinfo freeaddrinfo getifaddrs gethostbyname gethostname'
# pthread_*, fork and the like: only in the launcher of dt_comm.h and the offload to disk of dt_zero.h.
LAUNCHER=${LAUNCHER:-dt_run dt__run dt__io dt__files}

group_symbols() {
    local h=${HEADERS##* }
    have objdump || { skip symbols "objdump is not installed"; return; }
    printf '#define _GNU_SOURCE\n#define DT_IMPLEMENTATION\n#include "%s"\n' "$h" >"$T/sym.c"
    # without optimisation gcc keeps all data that is declared writable, and each call in its own function
    job "symbols $h: compiles with gcc -O0" gcc -O0 -fno-pie -fno-builtin -ffunction-sections -fdata-sections -Wall -Wextra \
        -Werror -I"$ROOT" -c "$T/sym.c" -o "$T/sym.o"
    job "symbols $h: compiles with gcc -O0 -fPIC" gcc -O0 -fPIC -I"$ROOT" -c "$T/sym.c" -o "$T/sympic.o"
}

found_symbols() {
    local log=$T/found f
    [ -s "$T/sym.o" ] && [ -s "$T/sympic.o" ] || return
    nm "$T/sym.o" | awk '$2 ~ /^[DdBbCGgSsV]$/' >"$log"
    check "symbols: nm shows no writable data" "$log"
    # position independent code keeps constant tables of pointers in .data.rel.ro, which is read-only once linked
    objdump -t "$T/sympic.o" | awk '$NF != $4 && / (O|TLS) |\*COM\*/ && /[ \t](\.data|\.bss|\.tdata|\.tbss|\*COM\*)/ && !/\.data\.rel\.ro/' >"$log"
    check "symbols: no writable data with -fPIC" "$log"
    nm -g --defined-only "$T/sym.o" | awk '$3 !~ /^dt_/ { print $3 }' >"$log"
    check "symbols: no global name outside dt_" "$log"
    nm -g --defined-only "$T/sym.o" | awk '$3 ~ /^dt__/ { print $3 }' >"$log"
    check "symbols: no private name (dt__) is global" "$log"
    for f in $HEADERS; do
        declared "$f"
    done | awk '{ print $2 }' | sort -u >"$T/declared"
    nm -g --defined-only "$T/sym.o" | awk '$3 ~ /^dt_[^_]/ { print $3 }' | sort -u >"$T/defined"
    comm -23 "$T/declared" "$T/defined" | grep -v -e '^dt_kernels_cuda$' -e '^dt_cuda_ready$' | sed 's/$/ is declared but not defined/' >"$log"
    comm -13 "$T/declared" "$T/defined" | sed 's/$/ is defined but not declared/' >>"$log"
    check "symbols: what is declared is defined, and nothing else" "$log" 30
    # section and libc name of each reference
    objdump -r "$T/sym.o" | awk '/^RELOCATION RECORDS FOR/ { s = $4; gsub(/[\[\]:]/, "", s); next }
        NF == 3 && s !~ /^\.(debug|eh_frame|rela?\.)/ { v = $3; sub(/[-+]0x[0-9a-f]+$/, "", v); sub(/@.*/, "", v); print s, v }' |
        sort -u >"$T/refs"
    [ -s "$T/refs" ] || echo "objdump shows no references" >"$log"
    awk -v never="$NEVER" 'BEGIN { split(never, a, /[ \n]+/); for (i in a) bad[a[i]] = 1
            who["fork"] = "dt__run_start"; who["_exit"] = "dt__(run_start|rank_end|fault_strike)"; who["getenv"] = "dt__(run_env|launch_env|tcp_key)" } $2 in bad && !($2 in who && $1 ~ "^[.]text[.](unlikely[.])?" who[$2] "$") { print $1 " uses " $2 }' "$T/refs" >>"$log"
    check "symbols: nothing ends the program, prints or touches signals and the environment" "$log" 30
    awk -v tables="$TABLES" -v sockets="$SOCKETS" 'BEGIN { split(tables, a, /[ \n]+/); for (i in a) only[a[i]] = 1
            split(sockets, b, /[ \n]+/); for (i in b) net[b[i]] = 1 }
        $1 ~ /^\.text\.(unlikely\.)?dt__run_/ && $2 ~ /^fflush$/ { next }
        $1 == ".text.dt__tcp_token_file" && $2 ~ /^(open|fstat|read)(64)?$/ { next }
        $2 in net && $1 ~ /^\.text\.(unlikely\.)?dt__tcp_/ { next }
        ($2 in only || $2 in net) && $1 !~ /^\.text\.(unlikely\.)?dt__(host|io)_/ { print $1 " uses " $2 }' "$T/refs" >"$log"
    check "symbols: memory, files and time only through the default tables, sockets only in dt__tcp_" "$log" 30
    awk -v launcher="$LAUNCHER" 'BEGIN { n = split(launcher, a, / +/) }
        $2 ~ /^(pthread_|thrd_|mtx_|sem_|__pthread|clone$|fork$|waitpid$|kill$)/ { ok = 0
            for (i = 1; i <= n; i++) if ($1 == ".text." a[i] || index($1, ".text." a[i] "_") == 1) ok = 1
            if (!ok) print $1 " uses " $2 }' "$T/refs" >"$log"
    check "symbols: threads and processes only in the launcher, and for writing to disk" "$log" 30
}

# ---- text -----------------------------------------------------------------------------------------------------------

# Prints "ok NAME" or "BAD NAME" for each function declared with DT_API. It is ok with a tag in the comment above the
# function or above its group, or with a comment in a section that says "All ops are [...]".
declared() {
    awk '
        /^#endif \/\* DT_[A-Z]+_H \*\// { exit }
        /^\/\/ ==== / { all = 0; tagged = commented = 0; next }
        /^[ \t]*$/ && !incomment { tagged = commented = 0; next }
        !incomment && /^\/\*/ { text = ""; incomment = 1 }
        incomment {
            text = text " " $0
            if (/\*\//) {
                incomment = 0; commented = 1
                gsub(/[ \t]+/, " ", text)
                # a comment between declarations of a group adds to the comment of the group
                tagged = tagged || text ~ /\[(local|pairwise|collective[^]]*|[^]]*the caller is the supervisor[^]]*)\]/
                if (text ~ /All ((ops|functions of this section) are )?\[(local|collective[^]]*)\]/) all = 1
            }
            next
        }
        /^DT_API / {
            name = $0
            if (!match(name, /dt_[A-Za-z0-9_]+ *\(/)) next
            name = substr(name, RSTART, RLENGTH - 1); sub(/ +$/, "", name)
            print ((tagged || (all && commented)) ? "ok " : "BAD ") name
        }' "$1"
}

# Prints the length of each function, "LINES NAME FILE:LINE", and of each macro of several lines, as "macro NAME".
function_lengths() {
    awk '
        FNR == 1 { infn = 0; start = 0; incomment = 0; m = 0 }
        function name_of(t) {
            gsub(/__attribute__ *\(\([^)]*\)*\)/, "", t)
            if (match(t, /[A-Za-z_][A-Za-z0-9_]*(\([A-Za-z0-9_]*\))? *\(/)) { t = substr(t, RSTART, RLENGTH); sub(/ *\($/, "", t) }
            return t
        }
        m && !/\\$/ { print FNR - m + 1, "macro", mname, FILENAME ":" m; m = 0; next }
        m { next }
        infn { if (/^}/) { if (infn == 1) print FNR - start + 1, "function", name, FILENAME ":" start; infn = start = 0 } next }
        incomment { if (/\*\//) incomment = 0; next }
        /^#[ \t]*define.*\\$/ { m = FNR; mname = $2; start = 0; next }
        /^[ \t]*$/ || /^#/ || /^\/\// { start = 0; next }
        /^\/\*/ { start = 0; if (!/\*\//) incomment = 1; next }
        {
            line = $0; sub(/\/\*.*\*\/[ \t]*$/, "", line); sub(/\/\/.*$/, "", line); sub(/[ \t]+$/, "", line)
            if (!start) { start = FNR; text = "" }
            text = text " " line
            if (line ~ /\{$/) {
                if (text ~ /extern "C"/) { start = 0; next }
                infn = (text ~ /\)/ && text !~ /=/ && text !~ /^ *(typedef|enum|union)/) ? 1 : 2
                name = name_of(text)
            } else if (line ~ /[;}]$/) start = 0
        }' "$@"
}

# Names of version 0.1 that are not words of the field. The HISTORY of each header has the new names.
old_names="dt_unit dt_units_desc dt_box dt_cut dt_mark DT_PART DT_SAME dt_sight sight box cut cuts marks kept passing hand_over
    elsewhere brief remake blind turned anew bulletin said heard guest chair door seat trail fly landed dt__to dt__of dt__keep"
group_names() {
    local log=$T/names f
    have gcc || { skip "text: names of version 0.1" "gcc is not installed"; return; }
    for f in $HEADERS dt_kernels.cu examples/*.[ch] examples/*.cu; do
        [ -e "$f" ] || continue
        gcc -fpreprocessed -dD -E -P -x c++ "$f" 2>/dev/null | sed 's/"[^"]*"//g' | # without comments and texts
            grep -owE "$(tr -s ' \n' '|' <<<"$old_names" | sed 's/|$//')" | sort -u | sed "s|^|$f: |"
    done >"$log"
    check "text: no name of version 0.1 is left" "$log" 30
}

# Every C, C++ and CUDA file follows .clang-format. Other versions of clang-format may format the same code differently.
group_format() {
    local log=$T/format version
    version=$(clang-format --version 2>/dev/null | grep -o 'version [0-9]*')
    [ "$version" = "version 14" ] || { skip "text: .clang-format" "it needs clang-format 14, and there is ${version:-none}"; return; }
    find . -name build\* -prune -o \( -name '*.[ch]' -o -name '*.cc' -o -name '*.cu' \) -print |
        xargs clang-format --dry-run -Werror 2>&1 | grep error: >"$log"
    check "text: all files are formatted as .clang-format says" "$log"
}

group_text() {
    local h log=$T/found n files
    for h in $HEADERS; do
        # a line of CONTENTS may have search terms after the title
        awk '/^ *CONTENTS/ { on = 1; next } on && /^ *$/ { exit } on && /^ *[0-9]+\. / { sub(/^ +/, ""); print }' "$h" >"$T/contents"
        awk '/^\/\/ ==== / { sub(/^\/\/ ==== /, ""); sub(/ =+$/, ""); print }' "$h" >"$T/banners"
        awk 'NR == FNR { banner[++n] = $0; next } { m++; if (m > n || index($0, banner[m]) != 1) print }
             END { if (m != n) print m " lines of CONTENTS, " n " banners" }' "$T/banners" "$T/contents" >"$log"
        [ -s "$T/banners" ] || echo "no banners" >>"$log"
        check "text $h: the contents are the banners" "$log" 30
        declared "$h" >"$T/tags"
        awk '$1 == "BAD" { print $2 }' "$T/tags" >"$log"
        [ -s "$T/tags" ] || echo "no function found" >>"$log"
        check "text $h: each of $(wc -l <"$T/tags") public functions has a comment with a tag" "$log" 30
        awk 'length > 100 { print FNR ": " length " columns" }' "$h" >"$log"
        check "text $h: no line over 100 columns" "$log"
        n=$(wc -l <"$h")
        : >"$log"
        most=6000
        # 1,900 of them are checkpoints, 1,800 sparse tables with blocks of spilled rows, 570 Muon, 400 parameter groups, freezing and the EMA
        [ "$h" != dt_zero.h ] || most=11560
        # 2,300 of them read and write JSON and weight files, 700 place tensors, 330 store blocks of LoRA's base, 200 let
        # activations and gradients share memory
        [ "$h" != dt_tensor.h ] || most=17990
        [ "$h" != dt_parallel.h ] || most=6800  # 800 of them are the planner, 80 of these two profiles
        [ "$h" != dt_comm.h ] || most=12000     # 4,500 of them are tcp, MPI, NCCL and the trace
        [ "$n" -le $most ] || echo "$n lines" >"$log"
        check "text $h: $n lines, at most $most" "$log"
        grep -n -e 'TODO' -e 'FIXME' -e 'XXX' "$h" >"$log"
        check "text $h: nothing left to do" "$log"
        : >"$log"
        tail -n 70 "$h" | grep -qi 'history' || echo "no history at the end" >>"$log"
        tail -n 70 "$h" | grep -qi 'unlicense' && tail -n 70 "$h" | grep -qi 'without restriction' || echo "no licence at the end" >>"$log"
        check "text $h: ends with history and licence" "$log"
    done
    files=$HEADERS
    [ -e dt_kernels.cu ] && files="$files dt_kernels.cu"
    function_lengths $files >"$T/lengths"
    awk '$1 > 60 { printf "NOTE %s %s has %d lines (%s)\n", $2, $3, $1, $4 }' "$T/lengths"
    awk '$2 == "function" && $1 > 80 { print $3 " has " $1 " lines (" $4 ")" }' "$T/lengths" >"$log"
    [ "$(grep -c function "$T/lengths")" -ge 20 ] || echo "found only $(grep -c function "$T/lengths") functions" >>"$log"
    check "text: none of $(grep -c function "$T/lengths") functions is over 80 lines" "$log" 30
    group_format
    group_names
    if [ -e README.md ]; then
        n=$(wc -l <README.md)
        : >"$log"
        [ "$n" -le 200 ] || echo "$n lines" >"$log"
        check "text README.md: $n lines, at most 200" "$log"
    fi
    if [ -d examples ]; then
        grep -rn 'dt__' examples >"$log"
        check "text: examples use nothing private (dt__)" "$log"
    else
        skip "text: examples" "examples/ is not there"
    fi
}

# ---- guards ---------------------------------------------------------------------------------------------------------

group_guards() {
    local h log=$T/found d=$T/skew
    mkdir -p "$d"
    cp dt_*.h "$d"
    sed -i 's/^#define DT_VERSION 200/#define DT_VERSION 201/' "$d/dt_tensor.h"
    grep -q '^#define DT_VERSION 201' "$d/dt_tensor.h" || echo "DT_VERSION is not where it was"
    for h in $HEADERS; do
        [ "$h" = dt_tensor.h ] && continue
        echo "#include \"$h\"" >"$T/skew.c"
        gcc -I"$d" -fsyntax-only "$T/skew.c" >"$T/skew.log" 2>&1 && echo "compiles with dt_tensor.h of another version" >"$log" || : >"$log"
        grep -q "error.*$h 0.* needs .*copy all headers from one release" "$T/skew.log" || echo "no #error that names $h" >>"$log"
        check "guards $h: refuses another version" "$log"
    done
    for cc in gcc clang g++; do
        have $cc || { skip "guards: -ffast-math with $cc" "$cc is not installed"; continue; }
        echo '#include "dt_tensor.h"' >"$T/fast.c"
        : >"$log"
        $cc -ffast-math -I"$ROOT" -fsyntax-only "$T/fast.c" >"$T/fast.log" 2>&1 && echo "compiles" >"$log"
        grep -q 'error.*-ffast-math' "$T/fast.log" || echo "no #error about it" >>"$log"
        check "guards: -ffast-math is refused by $cc" "$log"
    done
}

# ---- examples in comments -------------------------------------------------------------------------------------------

# The words after "cc " or "nvcc " of a header's BUILD section, up to two spaces.
build_line() { awk -v c="$2" '/^   BUILD/ { on = 1; next } on && /^$/ { exit } on && $1 == c { sub(/^ +/, ""); sub(/  .*/, ""); print; exit }' "$1"; }

# A cc with warnings as errors, because some warnings appear only with optimisation.
strict_cc() { # strict_cc DIR
    mkdir -p "$1"
    printf '#!/bin/sh\nexec %s -Wall -Wextra -Werror "$@"\n' "$(command -v cc)" >"$1/cc"
    chmod +x "$1/cc"
}

run_example() { # run_example DIR COMMAND: the command builds train.c to a.out in DIR
    ( cd "$1" && sh -c "$2" && timeout $((100 * SLOW)) ./a.out >out.txt && [ -s out.txt ] || { cat out.txt 2>/dev/null; exit 1; } )
}

group_examples() {
    local h d line i only fast=cc
    have clang && fast=clang    # the faster compiler, except for the last header's build line
    for h in $(tac -s ' ' <<<"$HEADERS "); do   # the last first: it takes longest
        d=$T/example.$h
        mkdir -p "$d"
        awk '/^   QUICK EXAMPLE/ { on = 1; next } on && /^   [A-Z]/ { exit } on { sub(/^       /, ""); print }' "$h" >"$d/train.c"
        grep -q 'int main' "$d/train.c" || echo '#error "no program under QUICK EXAMPLE"' >"$d/train.c"
        line=$(build_line "$h" cc)
        [ -n "$FULL" ] && [ "$h" = "${HEADERS##* }" ] || line=${line/ -O3 / -O0 }
        [ -n "$FULL" ] || [ "$h" = "${HEADERS##* }" ] || line=${line/#cc /$fast }
        cp dt_*.h "$d"
        [ "$h" != "${HEADERS##* }" ] || strict_cc "$d/bin"      # which only the last has
        PATH=$d/bin:$PATH job "examples $h: QUICK EXAMPLE by its build line '$line'" run_example "$d" "${line:-false}"
        # the declarations alone; group compile compiles the implementation with this compiler
        sed '/^#define DT_IMPLEMENTATION/d' "$d/train.c" >"$d/only.c"
        only=train
        [ "$h" != "${HEADERS##* }" ] || only=only
        job "examples $h: QUICK EXAMPLE as C11, no warnings" gcc -std=c11 -D_GNU_SOURCE -Wall -Wextra -Wpedantic -Werror -I"$ROOT" -fsyntax-only "$d/only.c"
        job "examples $h: QUICK EXAMPLE as C++17, no warnings" g++ -x c++ -std=c++17 -Wall -Wextra -Werror -Wno-missing-field-initializers -I"$ROOT" -fsyntax-only "$d/$only.c"
        line=$(build_line "$h" nvcc)
        [ "$line" = "$(build_line "${HEADERS##* }" nvcc)" ] || job "examples $h: the nvcc line is that of ${HEADERS##* }" false
        if [ "$h" = "${HEADERS##* }" ] && have nvcc && [ -e dt_kernels.cu ]; then
            cp -r "$d" "$d.nvcc"
            cp dt_kernels.cu "$d.nvcc"
            line=${line/ -O3 / -O0 }
            if [ -n "$KERNELS_AT" ]; then   # the kernels take minutes to compile, so they are compiled once
                job "examples $h: QUICK EXAMPLE by '$line'" after "$KERNELS_AT" run_example "$d.nvcc" \
                    "${line/dt_kernels.cu/$T/kernels.o}"
            else job "examples $h: QUICK EXAMPLE by '$line'" run_example "$d.nvcc" "${line:-false}"; fi
        fi
    done
    have nvcc && [ -e dt_kernels.cu ] || skip "examples: build lines of nvcc" "nvcc or dt_kernels.cu is not there"
    if [ -e README.md ]; then
        # the programs of README.md; a diff changes the program before it into another program
        awk -v dir="$T" '/^```c[ \t]*$/ { n++; f = dir "/readme." n ".c"; on = 1; next }
            /^```diff[ \t]*$/ { f = dir "/readme." n ".diff"; on = 1; next }
            /^```/ { on = 0 } on { print >f }' README.md
        i=0
        for f in "$T"/readme.*.c "$T"/readme.*.diff; do
            [ -e "$f" ] && grep -q 'int main' "${f%.*}.c" || continue
            i=$((i + 1))
            d=$T/readme.d$i
            mkdir -p "$d"
            cp "${f%.*}.c" "$d/train.c"
            cp dt_*.h "$d"
            if [[ $f == *.diff ]] && ! patch -s --fuzz=0 "$d/train.c" "$f" >"$T/patch.log" 2>&1; then
                check "examples README.md: the diff applies" "$T/patch.log"
                continue
            fi
            job "examples README.md: program $i" run_example "$d" "$fast -O0 train.c -lm -lpthread"
        done
        [ $i -gt 0 ] || job "examples README.md: has a program" false
    else
        skip "examples: README.md" "README.md is not there"
    fi
}

# ---- planted violations ---------------------------------------------------------------------------------------------

# plant FILE LINE TEXT: puts TEXT before the first line that begins with LINE
plant() {
    awk -v at="$2" -v text="$3" '!done && index($0, at) == 1 { printf "%s\n", text; done = 1 } { print }
        END { exit !done }' "$1" >"$1.new" && mv "$1.new" "$1" ||
        { echo "no line $2" >"$T/found"; check "planted: place in ${1##*/}" "$T/found"; }
}

planted_run() { # planted_run GROUPS...: checks the copy and keeps the failures
    HEADERS=$planted_headers CONFIGS=$planted_configs bash "$self" -C "$P" "$@" >"$T/planted.out" 2>&1 &&
        echo "status 0" >"$T/planted.out"
    grep '^FAIL\|^    ' "$T/planted.out" >"$T/planted.fails"
}

expect() { # expect WHAT PATTERN: a line of the failures must match
    : >"$T/found"
    grep -qE "$2" "$T/planted.fails" || { echo "not found: $2"; tail -n 5 "$T/planted.out"; } >"$T/found"
    check "planted: $1" "$T/found"
}

fresh_copy() { rm -rf "$P"; mkdir -p "$P/tests"; cp "$ROOT"/dt_* "$ROOT/.clang-format" "$P"; [ ! -d "$ROOT/examples" ] || cp -r "$ROOT/examples" "$P"; }

plant_symbols() {
    fresh_copy
    planted_headers="dt_tensor.h dt_comm.h dt_parallel.h dt_zero.h" planted_configs=gcc:c11
    plant "$P/dt_zero.h" '#endif /* DT_ZERO_H */' 'DT_API int dt_planted_missing(void);'
    plant "$P/dt_zero.h" '#endif /* DT_ZERO_IMPL */' '#include <stdlib.h>
#include <pthread.h>
#include <unistd.h>
static int dt__planted_count;
int dt_planted_undeclared(void) { return ++dt__planted_count; }
int planted_foreign(void) { return 1; }
int dt__planted_private(void) { return 1; }
void dt_planted_exit(void) { exit(3); }
void dt_planted_print(void) { printf("x"); }
void *dt_planted_malloc(void) { return malloc(3); }
void (*dt_planted_free(void))(void *) { return free; }
long dt_planted_read(void) { char c; return read(0, &c, 1); }
pthread_t dt_planted_thread(void) { return pthread_self(); }'
    planted_run symbols
    expect "a counter without a rank" 'dt__planted_count'
    expect "a counter without a rank, -fPIC" 'bss.*dt__planted_count'
    expect "a global name outside dt_" '^    planted_foreign'
    expect "a private name that is global" '^    dt__planted_private'
    expect "declared, not defined" 'dt_planted_missing is declared but not defined'
    expect "defined, not declared" 'dt_planted_undeclared is defined but not declared'
    expect "exit" 'dt_planted_exit uses exit'
    expect "printf" 'dt_planted_print uses printf'
    expect "malloc past the table" 'dt_planted_malloc uses malloc'
    expect "the address of free past the table" 'dt_planted_free uses free'
    expect "read past the table" 'dt_planted_read uses read'
    expect "a thread outside the launcher" 'dt_planted_thread uses pthread_self'
}

plant_text() {
    fresh_copy
    planted_headers="dt_tensor.h dt_comm.h dt_parallel.h dt_zero.h"
    sed -i 's/^\/\/ ==== 3\. .* \(=*\)$/\/\/ ==== 3. Another title \1/' "$P/dt_comm.h"
    plant "$P/dt_parallel.h" '#endif /* DT_PARALLEL_H */' '
DT_API int dt_planted_bare(void);

/* It has a comment but no tag. */
DT_API int dt_planted_untagged(void);'
    plant "$P/dt_tensor.h" '#endif /* DT_TENSOR_H */' "/* $(printf '%0100d' 0) */"
    plant "$P/dt_parallel.h" '#endif /* DT_PARALLEL_IMPL */' "static int dt__planted_long(int x,
    int y) {
$(for i in $(seq 80); do echo "    x += y;"; done)
    return x;
}
/* TODO */"
    plant "$P/dt_zero.h" '#endif /* DT_ZERO_IMPL */' "$(for i in $(seq 6000); do echo '/* */'; done)"
    mkdir -p "$P/examples"
    echo 'int x =  dt__private, guest;' >"$P/examples/planted.c"
    sed -i 's/[Hh]istory//; s/HISTORY//' "$P/dt_comm.h"
    planted_run text
    expect "no history" 'dt_comm.h: ends with history'
    expect "a banner that is not in the contents" "dt_comm.h: the contents are the banners"
    expect "a function without a comment" 'dt_planted_bare'
    expect "a comment without a tag" 'dt_planted_untagged'
    expect "a long line" '^    [0-9]+: 106 columns'
    expect "a long header" 'dt_zero.h: .*lines, at most 11560'
    expect "a long function" 'dt__planted_long has 8[0-9] lines'
    expect "work left to do" '/\* TODO \*/'
    expect "private names in examples" 'planted.c:1:int x =  dt__private'
    expect "a name of version 0.1" 'examples/planted.c: guest'
    expect "a file that is not formatted" 'examples/planted.c:1.*clang-formatted'
}

plant_guards() {
    fresh_copy
    planted_headers="dt_tensor.h dt_comm.h dt_parallel.h dt_zero.h"
    sed -i 's/^#error "dt_comm.h.*//' "$P/dt_comm.h"
    sed -i 's/^#error "dt promises.*//' "$P/dt_tensor.h"
    planted_run guards
    expect "no version check" 'guards dt_comm.h: refuses another version'
    expect "-ffast-math allowed" 'guards: -ffast-math is refused by gcc'
}

plant_examples() {
    fresh_copy
    planted_headers="dt_tensor.h dt_comm.h"
    sed -i 's/^       int main(void) {/       int main(void) { int unused;/' "$P/dt_tensor.h"
    sed -i 's/^           return failed;/           return 3;/' "$P/dt_tensor.h"
    plant "$P/dt_comm.h" '#endif /* DT_COMM_IMPL */' 'int dt_planted_maybe(int n) { int m; if (n > 3) m = n; return m + 1; }'
    printf '```c\nint main(void) { return 1; }\n```\n' >"$P/README.md"
    planted_run examples
    expect "a QUICK EXAMPLE with a warning" 'dt_tensor.h: QUICK EXAMPLE as C11'
    expect "a QUICK EXAMPLE that fails" 'dt_tensor.h: QUICK EXAMPLE by its build line'
    expect "a warning where it is optimised" 'dt_planted_maybe|.m. may be used uninitialized'
    expect "a README program that fails" 'README.md: program 1'
}

plant_compile() {
    fresh_copy
    planted_headers="dt_tensor.h" planted_configs=gcc:c11
    plant "$P/dt_tensor.h" '#endif /* DT_TENSOR_H */' 'int dt_planted_defined(void);
int dt_planted_defined(void) { return 1; }'
    planted_run compile
    expect "a function defined among the declarations" 'gcc c11 dt_tensor.h: implementation and use in two files'
    fresh_copy
    plant "$P/dt_tensor.h" '#endif /* DT_TENSOR_IMPL */' 'int dt_planted_extern(void);
int dt_planted_extern(void) { return 1; }'
    planted_run compile
    expect "a function that DT_STATIC leaves visible" 'gcc c11 dt_tensor.h: DT_STATIC in two files'
    fresh_copy
    planted_configs="gcc:c11 g++:c++17"
    plant "$P/dt_tensor.h" '#endif /* DT_TENSOR_H */' 'static inline int dt_planted_word(int class) { return class; }'
    planted_run compile
    expect "a C++ keyword as a name" 'g\+\+ c\+\+17 dt_tensor.h: declarations$'
    : >"$T/found"
    grep -q '^PASS gcc c11 dt_tensor.h: declarations$' "$T/planted.out" || echo "C fails too" >"$T/found"
    check "planted: ... which C allows" "$T/found"
    fresh_copy
    planted_configs=gcc:c11
    plant "$P/dt_tensor.h" '#endif /* DT_TENSOR_IMPL */' 'static int dt__planted_unused(int n) { int m; return n; }'
    planted_run compile
    expect "a warning in the implementation" 'gcc c11 dt_tensor.h: declarations, then implementation'
    fresh_copy
    plant "$P/dt_tensor.h" '#endif /* DT_TENSOR_IMPL */' 'int dt_planted_outer(int n);
int dt_planted_outer(int n) { for (int i = 0; i < 2; i++) { int n = i; (void)n; } return n; }'
    planted_run compile
    expect "a local name that hides another" 'gcc c11 dt_tensor.h: declarations, then implementation'
    fresh_copy
    planted_configs=g++:c++17
    sed -i 's/^#if defined(__cplusplus) && defined(__GNUC__)$/#if 0/' "$P/dt_tensor.h"
    planted_run compile
    expect "a warning of C++ alone" 'g\+\+ c\+\+17 dt_tensor.h: declarations, then implementation'
    fresh_copy
    planted_headers="dt_tensor.h dt_comm.h"
    plant "$P/dt_kernels.cu" '#ifdef DT_NCCL_DLOPEN' 'static int planted;'
    planted_run compile
    if grep -q '^SKIP g++ c++17: DT_NCCL_DLOPEN' "$T/planted.out"; then skip "planted: NCCL" "its headers are not here"
    else expect "a warning where NCCL is looked up at run time" 'g\+\+ c\+\+17: DT_NCCL_DLOPEN'; fi
}

group_planted() {
    P=$T/planted
    plant_symbols
    plant_text
    plant_guards
    plant_examples
    plant_compile
}

late_jobs_wait=yes
for g in $groups; do
    case $g in
        compile | others | symbols | text | guards | examples | planted) "group_$g" ;;
        *) echo "no such group: $g" >&2; exit 2 ;;
    esac
done
collect
[[ " $groups " != *" symbols "* ]] || found_symbols
echo "test_headers: $passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
