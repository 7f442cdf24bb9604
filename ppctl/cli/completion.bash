# ppctl's completion for bash. In ~/.bashrc: source <(ppctl completion bash)
_ppctl() {
  local line=${COMP_LINE:0:COMP_POINT} current word IFS=$' \t'
  local -a words
  read -ra words <<<"$line"
  [[ $line == *[[:blank:]] ]] && words+=("")
  current=${words[${#words[@]}-1]}
  COMPREPLY=()
  while IFS=$'\t' read -r word _; do
    [[ $word == "$current"* ]] && COMPREPLY+=("$word")
  done < <("${words[0]}" completion words -- "${words[@]:1}" 2>/dev/null)
  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  # bash itself breaks words at = and : where COMP_WORDBREAKS has them, and replaces what stands behind.
  local head=${current%"${current##*[=:]}"}
  [[ $head == *: && $COMP_WORDBREAKS != *:* ]] && head=
  [[ $head == *= && $COMP_WORDBREAKS != *=* ]] && head=
  COMPREPLY=("${COMPREPLY[@]#"$head"}")
}
complete -o default -F _ppctl ppctl
