# Completions of zfolio for fish.

function __zfolio_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l answer ($words[1] __complete -- $words[2..-1] 2>/dev/null)
    or return
    switch $answer[1]
        case words
            for line in $answer[2..-1]
                echo $line
            end
        case files folders
            # '--stats=na': only the file name is completed, and the option is put before it again.
            # An empty word if there is no option: an empty list before the names would remove the names.
            set -l prefix (string match -r -- '^--[^=]*=' $words[-1]; or echo)
            set -l name (string replace -r -- '^--[^=]*=' '' $words[-1])
            if test $answer[1] = files
                string join \n -- $prefix(__fish_complete_path $name)
            else
                string join \n -- $prefix(__fish_complete_directories $name)
            end
        case 'program *'
            set -l place (string replace 'program ' '' -- $answer[1])
            set -l rest $words[(math $place + 2)..-1]
            set -l line (string escape -- $rest[1..-2])
            # The word that is being typed stays unchanged: it may have an open quote.
            complete -C "$line $rest[-1]"
    end
end

complete -c zfolio -f -a '(__zfolio_complete)'
