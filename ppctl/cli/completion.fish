# ppctl's completion for fish. As a file: ppctl completion fish > ~/.config/fish/completions/ppctl.fish
function __ppctl_words
    set -l words (commandline --tokenize --current-process --cut-at-cursor)
    set -a words (commandline --current-token --cut-at-cursor)
    $words[1] completion words -- $words[2..-1] 2>/dev/null
end
complete -c ppctl -a '(__ppctl_words)'
