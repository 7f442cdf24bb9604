#compdef ppctl
# ppctl's completion for zsh. In ~/.zshrc, behind compinit: source <(ppctl completion zsh)
_ppctl() {
  local word text
  local -a ended open
  while IFS=$'\t' read -r word text; do
    if [[ $word == *= ]]; then open+=("${word//:/\\:}:$text"); else ended+=("${word//:/\\:}:$text"); fi
  done < <("${words[1]}" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)
  (( $#ended )) && _describe -t words ppctl ended
  (( $#open )) && _describe -t keys ppctl open -S ''
  (( $#ended + $#open )) || _files
}
compdef _ppctl ppctl
