//! Size classes by arithmetic: how large the objects of a class are, how long its zspages.
//!
//! A zspage is virtually contiguous, so any number of pages is as good as another and an object may
//! cross a page boundary. What a class costs is therefore arithmetic only:
//!
//! - *spacing*: an object is on average half a step smaller than its class. Steps are 1/56 of the
//!   size (at least 16 bytes), so 0.9 % is lost;
//! - *tail*: `pages * PAGE_BYTES % object_bytes`. Sizes are not fixed in advance: each is the
//!   largest that divides some run of pages evenly, so the tail is a few bytes per object;
//! - *number*: each class in use has on average half a page that is touched and not filled (the
//!   pages beyond take no memory, `ZS-6` of the parent), 2 KiB each. This is what small pools pay.
//!
//! With `L = ln(largest / smallest size in use)`, steps `1/d` and a pool of `B` bytes that is
//! `1/(2d) + 2048 * d * L / B`: for 64 KiB units of 8 to 40 KiB in a pool of 20 MiB, 0.89 % + 0.88 %.

use crate::page::{PAGE_BYTES, UNIT_ORDER_MAX, UnitOrder};

/// The smallest class; smaller objects are stored in it.
const OBJECT_BYTES_MIN: usize = 32;

/// Steps between classes are at least this.
const STEP_BYTES_MIN: usize = 16;

/// Steps between classes are at most one such part of the size.
const STEPS_PER_SIZE: usize = 56;

/// Objects from here on have a zspage of their own, and only the pages that they need are touched.
const SINGLE_BYTES_MIN: usize = 48 * PAGE_BYTES;

/// Object sizes are multiples of this (but a whole page always is one).
const ALIGN_BYTES: usize = 8;

/// The most objects of a zspage: their number fits 7 bits of a handle's word.
pub(super) const OBJECTS_MAX: usize = 128;

/// Shorter zspages are not worth their descriptor (72 bytes and more).
const ZSPAGE_BYTES_MIN: usize = 32 << 10;

/// What is lost, in millionths, when a zspage is one page longer: it empties less often.
const LONGER_PPM: usize = 125;

/// What is lost when a zspage is half of `ZSPAGE_BYTES_MIN`: one descriptor more.
const SHORTER_PPM: usize = 3000;

const _: () = {
    assert!(PAGE_BYTES % ALIGN_BYTES == 0 && OBJECT_BYTES_MIN % ALIGN_BYTES == 0);
    // The smallest class fills no less than a page with the most objects that a zspage may have.
    assert!(OBJECTS_MAX * OBJECT_BYTES_MIN >= PAGE_BYTES);
    assert!(SINGLE_BYTES_MIN < PAGE_BYTES << UNIT_ORDER_MAX);
};

/// The arithmetic of one class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    /// Bytes of one object, and the longest length that the class takes.
    pub(super) object_bytes: usize,
    /// Pages of one zspage.
    pub(super) pages: usize,
    /// Objects of one zspage.
    pub(super) objects: usize,
}

/// A [`Shape`] in 8 bytes: there is one in each class.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedShape {
    object_bytes: u32,
    pages: u16,
    objects: u16,
}

impl PackedShape {
    pub(super) fn unpacked(self) -> Shape {
        Shape {
            object_bytes: self.object_bytes as usize,
            pages: usize::from(self.pages),
            objects: usize::from(self.objects),
        }
    }
}

impl Shape {
    pub(super) fn packed(self) -> PackedShape {
        PackedShape {
            object_bytes: u32::try_from(self.object_bytes).expect("2 MiB at most"),
            pages: u16::try_from(self.pages).expect("2 MiB at most"),
            objects: u16::try_from(self.objects).expect("OBJECTS_MAX at most"),
        }
    }

    /// Bytes at the end of a zspage that no object covers.
    fn tail_bytes(self) -> usize {
        self.pages * PAGE_BYTES - self.objects * self.object_bytes
    }

    /// What the shape loses against a perfect one that ends at `size_max`, in millionths.
    fn loss_ppm(self, size_max: usize) -> usize {
        let zspage_bytes = self.pages * PAGE_BYTES;
        let tail = self.tail_bytes() * 1_000_000 / zspage_bytes;
        // A smaller size than could be loses nothing itself, but makes more classes.
        let narrow = (size_max - self.object_bytes) * 250_000 / size_max;
        let short = SHORTER_PPM * ZSPAGE_BYTES_MIN.saturating_sub(zspage_bytes) / zspage_bytes;
        tail + narrow + short + self.pages * LONGER_PPM
    }
}

/// The classes of a pool of `unit`s, by rising size. The last is the unit itself, without waste.
pub(super) fn shapes(unit: UnitOrder) -> Vec<Shape> {
    let mut shapes = Vec::new();
    let mut below = 0;
    while below < unit.bytes() {
        let step = match below {
            0 => OBJECT_BYTES_MIN,
            SINGLE_BYTES_MIN.. => below / 8,
            _ => STEP_BYTES_MIN.max(below / STEPS_PER_SIZE),
        };
        // The last step may be half as long again, so that the class below the unit is not a sliver.
        let shape = if below + step + step / 2 >= unit.bytes() {
            whole(unit)
        } else if below >= SINGLE_BYTES_MIN {
            let pages = (below + step) / PAGE_BYTES;
            Shape { object_bytes: pages * PAGE_BYTES, pages, objects: 1 }
        } else {
            between(below, below + step)
        };
        below = shape.object_bytes;
        shapes.push(shape);
    }
    shapes
}

/// The class of incompressible units: whole pages, nothing lost.
fn whole(unit: UnitOrder) -> Shape {
    let objects = (ZSPAGE_BYTES_MIN / unit.bytes()).max(1);
    Shape { object_bytes: unit.bytes(), pages: objects * unit.pages(), objects }
}

/// The best shape with `below < object_bytes <= size_max`.
fn between(below: usize, size_max: usize) -> Shape {
    let mut best: Option<(usize, Shape)> = None;
    for pages in 1.. {
        if best.is_some_and(|(loss, _)| loss <= pages * LONGER_PPM) {
            break;
        }
        let objects = (pages * PAGE_BYTES).div_ceil(size_max);
        let object_bytes = pages * PAGE_BYTES / objects / ALIGN_BYTES * ALIGN_BYTES;
        assert!(
            objects <= OBJECTS_MAX || best.is_some(),
            "no run of pages divides into {OBJECTS_MAX} objects of {below} to {size_max} bytes"
        );
        if object_bytes > below && objects <= OBJECTS_MAX {
            let shape = Shape { object_bytes, pages, objects };
            let loss = shape.loss_ppm(size_max);
            if best.is_none_or(|(least, _)| loss < least) {
                best = Some((loss, shape));
            }
        }
    }
    let (_, shape) = best.expect("the loop ends only with a shape");
    shape
}

#[cfg(test)]
mod tests {
    use super::{OBJECTS_MAX, SINGLE_BYTES_MIN, shapes};
    use crate::page::{PAGE_BYTES, UNIT_ORDER_MAX, UnitOrder};

    fn orders() -> impl Iterator<Item = UnitOrder> {
        (0..=UNIT_ORDER_MAX)
            .map(|order| UnitOrder::from_bytes(PAGE_BYTES << order).expect("an order"))
    }

    /// Goal: `ZS-1`, and classes that rise to the unit. Method: every class of every order.
    #[test]
    fn every_object_lies_inside_its_zspage() {
        for unit in orders() {
            let shapes = shapes(unit);
            let mut below = 0;
            for shape in &shapes {
                assert!(shape.object_bytes > below, "{unit}: {shape:?} after {below}");
                assert!(shape.objects * shape.object_bytes <= shape.pages * PAGE_BYTES);
                assert!((1..=OBJECTS_MAX).contains(&shape.objects), "{unit}: {shape:?}");
                below = shape.object_bytes;
            }
            assert_eq!(below, unit.bytes());
        }
    }

    /// Goal: the bounds of the header. Method: tails and steps of every class of every order.
    #[test]
    fn steps_and_tails_are_short() {
        for unit in orders() {
            let shapes = shapes(unit);
            let mut below = 0;
            let mut tails_ppm = 0;
            for shape in &shapes {
                let step = shape.object_bytes - below;
                let single = shape.object_bytes > SINGLE_BYTES_MIN;
                assert!(single || step <= 32 || step * 30 <= shape.object_bytes, "{shape:?}");
                tails_ppm += shape.tail_bytes() * 1_000_000 / (shape.pages * PAGE_BYTES);
                below = shape.object_bytes;
            }
            let last = shapes.last().expect("at least the unit");
            assert_eq!(last.tail_bytes(), 0, "incompressible units waste nothing");
            assert!(tails_ppm / shapes.len() < 6000, "{unit}: {tails_ppm} in {}", shapes.len());
            assert!(shapes.len() < 600, "{unit}: {} classes", shapes.len());
            let small = shapes.iter().filter(|shape| shape.object_bytes < SINGLE_BYTES_MIN);
            let (pages, pages_max) =
                small.fold((0, 0), |(sum, max), shape| (sum + shape.pages, shape.pages.max(max)));
            println!("{unit}: {} classes, {pages} pages, at most {pages_max}", shapes.len());
            assert!(
                pages_max <= 2 * SINGLE_BYTES_MIN / PAGE_BYTES,
                "{unit}: a zspage of {pages_max} pages"
            );
        }
    }
}
