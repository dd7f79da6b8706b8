// The same as records.rb, with pointers in a map.
package main

// With C the program is linked dynamically: no library can be loaded into a static one.

import "C"

import (
	"fmt"
	"os"
	"strconv"
)

type record struct {
	name    string
	value   int
	older   int
	numbers []int
}

var state = 4711

func random(bound int) int {
	state = state * 16807 % 2147483647
	return state % bound
}

func key(id int) string {
	return "record-" + strconv.Itoa(id)
}

func main() {
	count, err := strconv.Atoi(os.Args[1])
	if err != nil {
		panic(err)
	}
	records := map[string]*record{}
	for id := 0; id < count; id++ {
		name := "name " + strconv.Itoa(id) + " of a record"
		records[key(id)] = &record{name, id % 97, random(id + 1), []int{id, id * 7 % 1009}}
	}

	sum := 0
	for n := 0; n < 2*count; n++ {
		one := records[key(random(count))]
		one.value = (one.value + one.numbers[1] + n) % 1009
		if n%4 == 0 {
			one.name = "name " + strconv.Itoa(one.numbers[0]) + ", changed by " + strconv.Itoa(n)
		}
		older := records[key(one.older)]
		older.value = (older.value + one.value) % 1009
		sum = (sum*31 + older.value + len(older.name)) % 2147483647
	}

	for id := 0; id < count; id++ {
		one := records[key(id)]
		sum = (sum*31 + one.value + len(one.name)) % 2147483647
		if id%(count/10) == 0 {
			fmt.Printf("%s: %d\n", one.name, one.value)
		}
	}
	fmt.Printf("%d records, %d\n", count, sum)
}
