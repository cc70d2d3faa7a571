#!/usr/bin/env bash
# test_bench.sh - the benchmarks run and print the format that scripts read: # lines, a header, rows with as many columns,
# and summary lines last. Speed is not tested.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh

bench() { # bench PROGRAM HEADER ROWS SUMMARY ARGS...: at least ROWS rows, and these names in the summary
    local program=$1 header=$2 rows=$3 summary=$4 columns names
    shift 4
    names=$(wc -w <<<"$summary")
    columns=$(tr -cd , <<<"$header" | wc -c)
    $MAKE -s "$B/$program" >"$dir/out" 2>&1
    report $? "$program builds"
    timeout $((120 * SLOW)) "$B/$program" "$@" >"$dir/out" 2>"$dir/err" </dev/null
    report $? "$program $*: status 0"
    grep -v '^#' "$dir/out" >"$dir/csv"
    [ "$(head -n 1 "$dir/csv")" = "$header" ]
    report $? "$program: the header is $header"
    sed 1d "$dir/csv" | grep -v '^summary,' >"$dir/rows"
    [ "$(wc -l <"$dir/rows")" -ge "$rows" ] && ! awk -F, -v n="$columns" 'NF != n + 1' "$dir/rows" | grep -q .
    report $? "$program: at least $rows rows, each of $((columns + 1)) columns"
    [ "$(grep '^summary,' "$dir/csv" | cut -d, -f2 | xargs)" = "$summary" ] &&
        [ "$(tail -n "$names" "$dir/out" | grep -c '^summary,[a-z0-9_]*,[0-9a-z.e+-]*$')" = "$names" ]
    report $? "$program: the last lines are the summary of $summary"
    head -n 1 "$dir/out" | grep -q '^# machine: '
    report $? "$program: the first line names the machine"
}

gemm="m,n,k,trans,dtype,threads,dt_gflops,peer,peer_gflops,ratio"
train="config,ranks,dtype,tokens_per_s,gflops,peer,peer_tokens_per_s,ratio,peak_rss_mib,peer_peak_rss_mib"
products="geomean_f32 min_f32 bf16_over_f32 geomean_f32_under_64 geomean_f32_gemv gemv_triad_share bf16_over_f32_nt \
bf16_over_f32_nn bf16_over_f32_tn geomean_bf16_gpt geomean_bf16_under_64 geomean_bf16_gemv"
bench bench_gemm "$gemm" 6 "$products" --quick --python no/such/python
awk -F, '$7 <= 0 { bad = 1 } END { exit bad || NR == 0 }' "$dir/rows"
report $? "bench_gemm: every rate of dt is positive"
bench bench_gemm "$gemm" 3 "$products" \
    --quick --dtype=f32 --threads 2 --openblas no/such/library
grep -q '^# peer: OpenBLAS is not installed at no/such/library' "$dir/out" &&
    ! grep -v ',none,nan,nan$' "$dir/rows" | grep -q .
report $? "bench_gemm without OpenBLAS says so and measures dt"
bench bench_attention "t,direction,dt_gflops,peer,peer_gflops,ratio" 2 "min_forward min_backward" \
    --quick --python no/such/python
grep -q '^# peer: PyTorch is not installed for no/such/python' "$dir/out" &&
    awk -F, '$3 <= 0 || $4 != "none" || $6 != "nan" { bad = 1 } END { exit bad || NR == 0 }' "$dir/rows"
report $? "bench_attention without PyTorch says so and measures dt"
figures="ratio_pytorch_f32 ratio_llmc_f32 product_rate_dt_gflops product_rate_openblas_gflops product_rate_share_f32 \
rss_ratio_f32 rss_ratio_zero1 zero1_over_f32 bf16_over_f32 ratio_pytorch_bf16 rss_ratio_bf16 loss_difference_f32"
bench bench_train "$train" 5 "$figures $(printf 'llama_%s ' $figures | xargs)" --quick
awk -F, '$4 <= 0 || $9 < 1 || $9 > 1000 { bad = 1 } END { exit bad || NR != 5 }' "$dir/rows"
report $? "bench_train: tokens a second, and a memory of some megabytes"
timeout $((60 * SLOW)) "$B/bench_train" --quick --profile >"$dir/out" 2>&1
awk -F, '/^matmul/ { n++; sum += $4 } /^(other|idle),/ { n++ } END { exit !(n == 5 && sum > 0 && sum <= 1) }' "$dir/out"
report $? "bench_train --profile: three kinds of matrix products, other and idle"
bench bench_generate "config,dtype,tokens_per_s,share_of_triad,peer,peer_tokens_per_s,ratio" 2 \
    "triad_gbs share_of_triad_f32 share_of_triad_bf16 ratio_pytorch_f32 ratio_pytorch_bf16 ratio_llama_cpp_f32 \
ratio_llama_cpp_bf16 check_difference_f32 check_difference_bf16" --quick
awk -F, '$3 <= 0 || $4 <= 0 || $5 != "none" { bad = 1 } END { exit bad || NR != 2 }' "$dir/rows"
report $? "bench_generate: tokens a second, and the share of the memory rate"
# the time of the clock itself is subtracted, so a share may be below 0 and the sum of others above 1
timeout $((60 * SLOW)) "$B/bench_generate" --quick --profile >"$dir/out" 2>&1
awk -F, '/^(matmul|attention|other),/ { n++; sum += $4 } END { exit !(n == 3 && sum > 0 && sum < 2) }' "$dir/out"
report $? "bench_generate --profile: matrix products, attention and other"
comm="op,backend,ranks,bytes,us,busbw_gbs,peer,peer_us,ratio,buffers,bound_us,bound_share"
figures=$(for suffix in "" _malloc _threads; do
    for op in all_reduce all_gather reduce_scatter all_to_all send_recv; do
        for f in geomean geomean_2_ranks min min_64 bound_share_min; do
            [[ $f = bound_share_min && ($op = reduce_scatter || $suffix = _malloc) ]] || echo "${op}_$f$suffix"
        done
    done
done | xargs)
bench bench_comm "$comm" 45 "$figures" --quick
awk -F, '$5 <= 0 || $6 <= 0 || $5 == "nan" { bad = 1 } END { exit bad || NR == 0 }' "$dir/rows"
report $? "bench_comm: every time and rate of dt is positive"
awk -F, '$4 > 1048576 && $10 == "range" && $1 != "reduce-scatter" && $12 !~ /^[0-9.]+$/ { bad = 1 }
    END { exit bad }' "$dir/rows"
report $? "bench_comm: the machine's bound is measured above 1 MiB"
bench bench_comm "$comm" 2 \
    "all_reduce_geomean all_reduce_geomean_2_ranks all_reduce_min all_reduce_min_64 all_reduce_bound_share_min" \
    --quick --ops=all-reduce --ranks 4 --backends procs --buffers range --sizes 64,4096 --mpi no/such/folder
grep -q '^# peer: Open MPI (mpicc and mpirun) is not installed at no/such/folder' "$dir/out" &&
    [ "$(cut -d, -f1-4,7-9 "$dir/rows" | xargs)" = \
      "all-reduce,procs,4,64,none,nan,nan all-reduce,procs,4,4096,none,nan,nan" ]
report $? "bench_comm without Open MPI says so and measures dt"
layouts="layout,ranks,dp,tp,cp,kind,sp,zero,tokens_per_s,ratio_to_1,mem_params,mem_grads,mem_optim,mem_acts,mem_comm,\
mem_peak,bytes_dp,bytes_tp,bytes_cp,pp,schedule,bytes_pp"
figures=$(for n in 1 2 4 8; do echo "best_tokens_per_s_$n best_ratio_$n least_peak_share_$n"; done | xargs)
for backend in threads procs; do
    bench bench_layouts "$layouts" 35 "$figures loss_difference" --quick --backend "$backend"
    awk -F, '$9 <= 0 || $2 != $3 * $4 * $5 * $20 || ($20 > 1) != ($22 > 0) || ($4 > 1) != ($18 > 0) || ($5 > 1) != ($19 > 0) ||
        ($3 * $5 > 1 && $17 <= 0) { bad = 1 } END { exit bad || NR == 0 }' "$dir/rows"
    report $? "bench_layouts over $backend: rates are positive, and bytes are sent along every axis of the layout"
    awk -F, '/^summary,loss_difference/ && $3 < 1e-5 { good = 1 } END { exit !good }' "$dir/csv"
    report $? "bench_layouts over $backend: every layout has the loss of one rank"
done
bench bench_tp_overlap "tp,sp,pieces,products_ms,traffic_ms,step_ms,ratio" 4 \
    "ratio_sp_on_pieces_0 ratio_sp_on_pieces_16 ratio_sp_off_pieces_0 ratio_sp_off_pieces_16" --quick
awk -F, '$7 <= 0 || ($3 == 0 && $7 < 1.5) { bad = 1 } END { exit bad || NR == 0 }' "$dir/rows"
report $? "bench_tp_overlap: without overlap, traffic that takes as long as the products doubles a step"
for p in bench_gemm bench_attention bench_train bench_generate bench_comm bench_layouts bench_tp_overlap; do
    "$B/$p" --quik >"$dir/out" 2>&1
    [ $? = 2 ] && grep -q '^error: --quik' "$dir/out"
    report $? "$p refuses an option it does not know"
done

finish
