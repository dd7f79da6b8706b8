# Completions of zfolio for bash, with or without the package bash-completion.

_zfolio() {
    local command=${COMP_WORDS[0]} words=() places=() joined=no prefix= index line what
    # For bash '=' and ':' are separate words: '--limit=1G' is three words here, and one for zfolio, as is
    # 'localhost:9100'.
    for ((index = 1; index <= COMP_CWORD; index++)); do
        if [[ ${COMP_WORDS[index]} == = && ${#words[@]} -gt 0 && ${words[-1]} == --* ]]; then
            words[-1]+='='
            joined=yes
        elif [[ ${COMP_WORDS[index]} == :* && -z ${COMP_WORDS[index]//:/} && ${#words[@]} -gt 0 ]]; then
            words[-1]+=${COMP_WORDS[index]}
            joined=yes
        elif [[ $joined == yes ]]; then
            prefix=${words[-1]}
            words[-1]+=${COMP_WORDS[index]}
            joined=no
        else
            words+=("${COMP_WORDS[index]}")
            places+=("$index")
            prefix=
        fi
    done
    [[ $joined == yes ]] && prefix=${words[-1]}

    COMPREPLY=()
    local current=${words[-1]#"$prefix"} answer=() kind=-f
    mapfile -t answer < <("$command" __complete -- "${words[@]}" 2>/dev/null)
    what=${answer[0]-}
    case $what in
    words)
        for line in "${answer[@]:1}"; do
            line=${line%%$'\t'*}
            COMPREPLY+=("${line#"$prefix"}")
        done
        ;;
    files | folders)
        [[ $what == folders ]] && kind=-d
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen "$kind" -- "$current")
        ;;
    program*)
        local place=${places[${what#program }]}
        if declare -F _command_offset >/dev/null; then
            _command_offset "$place"
        elif ((place == COMP_CWORD)); then
            mapfile -t COMPREPLY < <(compgen -c -- "$current")
        else
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -f -- "$current")
        fi
        ;;
    esac
}

complete -F _zfolio zfolio
