# index.awk - prints, for each term of TERMS (one a line), where the headers explain it, and the number of lines to read
#
#   awk -f index.awk TERMS dt_tensor.h dt_comm.h ...
#
# A term is explained by one of
#   - a comment at column 1, of a definition or at the head of a section, that has the term within its first 100
#     characters; the lines to read are the comment and the definition if they are at most 60, else the definition of dt_x
#     if the comment says "Read dt_x first"
#   - a line "Not built yet:" of a file's head, which has nothing more to read
#   - a line of CONTENTS that has the term, if the head of that section says "Read dt_x first"; the definition is read
# Output: TERM <tab> FILE:LINE <tab> LINES <tab> WHAT, or TERM <tab> - for a term that is not explained.

function squeeze(s) { gsub(/[ \t]+/, " ", s); return tolower(s) }

function length_of(start,    i, opened) { # lines of the definition that begins at line `start`
    for (i = start; i <= n && i < start + 400; i++) {
        if (line[start] ~ /^#define/) { if (line[i] !~ /\\$/) break; else continue }
        if (line[i] ~ /\{/) opened = 1
        if (line[i] ~ /^}/) break
        if (!opened && line[i] ~ /;/) break
        if (opened && i == start && line[i] ~ /}[^}]*;?[ \t]*$/) break
    }
    return i - start + 1
}

function name_after(text,    m) { # the name in "Read NAME first"
    if (!match(text, /[Rr]ead [A-Za-z0-9_]+(,? then [A-Za-z0-9_]+)* first/)) return ""
    m = substr(text, RSTART + 5)
    sub(/[, ].*/, "", m)
    return m
}

function position(text, t,    at, from, c) { # of the term t in the text, as full words; 0: not found
    for (from = 1; (at = index(substr(text, from), t)) > 0; from += at) {
        c = substr(text, from + at - 2, 1) substr(text, from + at - 1 + length(t), 1)
        if (from + at == 2) c = " " c
        if (c !~ /^[a-z0-9_]/ && c !~ /[a-z0-9_]$/) return from + at - 1
    }
    return 0
}

function offer(t, place, lines, what, at) { # the comment with the term closest to its start is the best
    if (t in best && best[t] <= 1000 * at + lines) return
    best[t] = 1000 * at + lines
    found[t] = place "\t" lines "\t" what
}

# Definitions of the file: where a name is defined, not declared, and how long it is.
function define(    i, s, name) {
    split("", size)
    for (i = 1; i <= n; i++) {
        if (line[i] !~ /^[A-Za-z#]/ || line[i] ~ /^(DT_API|return|else|typedef char)/) continue
        s = line[i]
        if (s ~ /^#define [A-Za-z]/) { sub(/^#define /, "", s); sub(/[^A-Za-z0-9_].*/, "", s); name = s }
        else if (s ~ /^(typedef )?(struct|enum)/) { sub(/^(typedef )?(struct|enum) /, "", s); sub(/[^A-Za-z0-9_].*/, "", s); name = s }
        else if (match(s, /[A-Za-z0-9_]+\(/)) name = substr(s, RSTART, RLENGTH - 1)
        else continue
        s = length_of(i)
        if (!(name in size) || size[name] < s) size[name] = s
    }
}

function examine(    i, j, k, at, t, text, lines, first, on, section, in_head) {
    define()
    for (i = 1; i <= n && i < 40; i++)
        if (line[i] ~ /^   Not built yet:/)
            for (k = 1; k <= terms; k++)
                if (position(squeeze(line[i] " " line[i + 1]), term[k])) offer(term[k], file ":" i, 1, "not built", 200)
    split("", head)
    for (i = 1; i <= n; i++) # the head of a section: its first comment
        if (line[i] ~ /^\/\/ ==== [0-9]+/) {
            section = line[i]; sub(/^\/\/ ==== /, "", section); sub(/\..*/, "", section)
            text = ""; in_head = 0
            for (j = i + 1; j <= n && j < i + 60; j++) {
                if (line[j] ~ /^(\/\*|\/\/)/) in_head = 1
                if (in_head) text = text " " line[j]
                if (in_head && (line[j] ~ /\*\/ *$/ || line[j] ~ /^$/)) break
            }
            head[section] = text
        }
    for (i = 1; i <= n; i++) {
        if (line[i] ~ /^ *CONTENTS/) { on = 1; continue }
        if (on && line[i] ~ /^ *$/) on = 0
        if (on) {
            if (line[i] ~ /^ *[0-9]+\. /) { section = line[i]; sub(/^ */, "", section); sub(/\..*/, "", section) }
            first = name_after(head[section])
            if (first == "" || !(first in size)) continue
            text = squeeze(line[i])
            for (k = 1; k <= terms; k++)
                if (position(text, term[k]))
                    offer(term[k], file ":" i, size[first], "section " section ", " first " first", 50)
            continue
        }
        if (line[i] !~ /^(\/\*|\/\/ )/ || line[i] ~ /^\/\/ (====|----)/ || line[i] ~ /^\/\* ----/) continue
        text = ""
        for (j = i; j <= n; j++) {
            text = text " " line[j]
            if (line[i] ~ /^\/\*/ ? line[j] ~ /\*\/ *$/ : line[j + 1] !~ /^\/\/ /) break
        }
        if (j > n) break
        t = text; sub(/^ (\/\*|\/\/) */, "", t); sub(/^(\[[^]]*\],? *)+/, "", t)
        text = squeeze(text)
        lines = line[j + 1] ~ /^[A-Za-z#]/ ? length_of(j + 1) : 0
        if (!lines && line[i - 1] !~ /^\/\/ ====/ && line[i - 2] !~ /^\/\/ ====/) { i = j; continue }
        first = name_after(text)
        t = substr(squeeze(t), 1, 100)
        for (k = 1; k <= terms; k++) {
            if (!(at = position(t, term[k]))) continue
            # the head of a section explains more than a comment in it, a forward declaration less
            at += !lines ? -1 : line[j + 1] ~ /^static .*;$/ ? 90 : 0
            if (j - i + 1 + lines <= 60) offer(term[k], file ":" i, j - i + 1 + lines, lines ? "definition" : "head of a section", at)
            else if (first in size) offer(term[k], file ":" i, size[first], first " first", at)
        }
        i = j
    }
}

FNR == 1 && file != "" && n { examine() }
FNR == 1 { files++; file = FILENAME; sub(/.*\//, "", file); n = 0; split("", line) }
files == 1 { if ($0 != "") term[++terms] = tolower($0); next }
{ line[++n] = $0 }
END {
    examine()
    for (k = 1; k <= terms; k++) print term[k] "\t" (term[k] in found ? found[term[k]] : "-")
}
