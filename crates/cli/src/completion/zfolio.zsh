#compdef zfolio
# Completions of zfolio for zsh.

_zfolio() {
    local -a answer offers
    local line what place
    answer=("${(@f)$($words[1] __complete -- "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    what=$answer[1]
    case $what in
    words)
        for line in "${(@)answer[2,-1]}"; do
            # A colon separates a word from its meaning.
            offers+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
        done
        (( $#offers )) && _describe zfolio offers
        ;;
    files)
        compset -P '--*='
        _files
        ;;
    folders)
        compset -P '--*='
        _files -/
        ;;
    program*)
        place=$(( ${what#program } + 1 ))
        shift $place words
        (( CURRENT -= place ))
        _normal
        ;;
    esac
}

# Works with 'source', and in a folder of fpath, where this file is the function itself.
if [[ $funcstack[1] == _zfolio ]]; then
    _zfolio "$@"
else
    compdef _zfolio zfolio
fi
