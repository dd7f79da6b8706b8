(* The same as records.rb, with records in a Hashtbl. *)
type record = { mutable name : string; mutable value : int; older : int; numbers : int list }

let count = int_of_string Sys.argv.(1)
let state = ref 4711

let random bound =
  state := !state * 16807 mod 2147483647;
  !state mod bound

let records : (string, record) Hashtbl.t = Hashtbl.create 16
let key id = "record-" ^ string_of_int id
let record id = Hashtbl.find records (key id)

let () =
  for id = 0 to count - 1 do
    let name = "name " ^ string_of_int id ^ " of a record" in
    let one = { name; value = id mod 97; older = random (id + 1); numbers = [ id; id * 7 mod 1009 ] } in
    Hashtbl.replace records (key id) one
  done;
  let sum = ref 0 in
  let add one = sum := ((!sum * 31) + one.value + String.length one.name) mod 2147483647 in
  for n = 0 to (2 * count) - 1 do
    let one = record (random count) in
    one.value <- (one.value + List.nth one.numbers 1 + n) mod 1009;
    if n mod 4 = 0 then
      one.name <- "name " ^ string_of_int (List.hd one.numbers) ^ ", changed by " ^ string_of_int n;
    let older = record one.older in
    older.value <- (older.value + one.value) mod 1009;
    add older
  done;
  for id = 0 to count - 1 do
    let one = record id in
    add one;
    if id mod (count / 10) = 0 then Printf.printf "%s: %d\n" one.name one.value
  done;
  Printf.printf "%d records, %d\n" count !sum
