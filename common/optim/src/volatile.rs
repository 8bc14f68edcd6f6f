//! Bytes that another process may write while they are read. Each byte is loaded once into a value
//! of this process, and none is borrowed.
//!
//! This is one of the few files that may hold `unsafe` code.

use std::marker::PhantomData;

use bytemuck::Pod;
use pushpull_common::finite::Exponents;

/// The size of a cache line.
pub const LINE_BYTES: usize = 64;

/// A range of such bytes. Bytes that change while they are loaded have any value.
#[derive(Clone, Copy, Debug)]
pub struct Volatile<'a> {
    start: *const u8,
    bytes: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> Volatile<'a> {
    /// Creates a range of `bytes` bytes.
    ///
    /// # Safety
    /// The bytes must be valid for reads for `'a`. Nothing in this process may write them, or
    /// borrow them if any process writes them. Another process may write them concurrently. Any
    /// content is a valid value of the loaded types, which are `u8` and [`Pod`] words, so soundness
    /// does not depend on it.
    #[inline]
    pub unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Volatile { start, bytes, memory: PhantomData }
    }

    /// Creates a range over bytes of this process, which nothing changes.
    #[inline]
    pub fn of(bytes: &'a [u8]) -> Self {
        // SAFETY: the borrow lasts as long as the result, so nothing writes the bytes.
        unsafe { Volatile::new(bytes.as_ptr(), bytes.len()) }
    }

    /// Drops the first `first` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn skip(self, first: usize) -> Volatile<'a> {
        assert!(first <= self.bytes, "cannot skip {first} of {} bytes", self.bytes);
        Volatile { start: self.start.wrapping_add(first), bytes: self.bytes - first, ..self }
    }

    /// Returns the offset of the first byte from a multiple of `bytes`.
    #[inline]
    pub fn offset_in(self, bytes: usize) -> usize {
        self.start.addr() % bytes
    }

    /// Loads a word exactly once. The compiler cannot repeat the load, so the value that is scanned
    /// is the value that is used.
    ///
    /// # Panics
    /// If the word is out of bounds or unaligned.
    #[inline(always)]
    pub fn load<W: Pod>(self, at: usize) -> W {
        let inside = at <= self.bytes && size_of::<W>() <= self.bytes - at;
        let word = self.start.wrapping_add(at).cast::<W>();
        assert!(inside && word.is_aligned(), "a word at {at} of {}", self.bytes);
        // SAFETY: the assertion has checked that the word is in bounds and aligned; the caller of
        // `new` has guaranteed the rest.
        unsafe { word.read_volatile() }
    }

    /// Returns `count` cache lines from this byte on.
    ///
    /// # Panics
    /// If there are fewer, or the byte does not start a cache line.
    #[inline(always)]
    pub(crate) fn lines(self, at: usize, count: usize) -> VolatileLines<'a> {
        let Volatile { start, bytes, memory } = self.skip(at);
        let begins = count == 0 || start.addr().is_multiple_of(LINE_BYTES);
        assert!(count <= bytes / LINE_BYTES && begins, "{count} lines at {at} of {}", self.bytes);
        VolatileLines { first: start, count, memory }
    }

    /// Copies the first bytes into `to`. Returns whether an exponent among them is full.
    ///
    /// Copies with loads and stores. The standard library uses the processor's instruction for long
    /// copies, whose start-up time halves the speed for 2 KiB.
    ///
    /// # Panics
    /// If there are fewer bytes than `to` takes.
    pub fn copy(self, to: &mut [u8], exponents: Exponents) -> bool {
        assert!(to.len() <= self.bytes, "{} of {} bytes", to.len(), self.bytes);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the feature.
            return unsafe { self.copy_wide(to, exponents) };
        }
        self.copy_by_words::<u64>(to, exponents)
    }

    /// Copies as [`Volatile::copy`] does, in words of 32 bytes.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn copy_wide(self, to: &mut [u8], exponents: Exponents) -> bool {
        self.copy_by_words::<std::arch::x86_64::__m256i>(to, exponents)
    }

    /// Copies as [`Volatile::copy`] does, in words of this type, and in bytes at the unaligned
    /// ends.
    #[inline(always)]
    fn copy_by_words<W: Pod>(self, to: &mut [u8], exponents: Exponents) -> bool {
        // Up to the first aligned word of the source.
        let head = self.start.align_offset(size_of::<W>()).min(to.len());
        let (first, rest) = to.split_at_mut(head);
        let mut words = rest.chunks_exact_mut(size_of::<W>());
        let mut at = head;
        let mut sums = [0; 4];
        for word in &mut words {
            let value: W = self.load(at);
            let value = bytemuck::bytes_of(&value);
            word.copy_from_slice(value);
            for (sum, part) in sums.iter_mut().zip(value.as_chunks().0) {
                *sum |= exponents.plus_last(u64::from_ne_bytes(*part));
            }
            at += size_of::<W>();
        }
        let last = words.into_remainder();
        for (start, bytes) in [(0, &mut *first), (at, &mut *last)] {
            for (offset, byte) in bytes.iter_mut().enumerate() {
                *byte = self.load(start + offset);
            }
        }
        // Usually there are none. A scan of empty slices would take a tenth of the whole time.
        let ends = !(first.is_empty() && last.is_empty())
            && (exponents.are_full_in(first) || exponents.are_full_in(last));
        ends || exponents.were_full(sums.into_iter().fold(0, |all, sum| all | sum))
    }
}

/// Whole cache lines of such bytes. A loop over a known number of them needs no bounds check for
/// each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VolatileLines<'a> {
    first: *const u8,
    count: usize,
    memory: PhantomData<&'a [u8]>,
}

impl VolatileLines<'_> {
    /// An empty range.
    pub(crate) const NONE: VolatileLines<'static> =
        VolatileLines { first: std::ptr::null(), count: 0, memory: PhantomData };

    /// Loads the words of a line, each as [`Volatile::load`] does.
    ///
    /// # Panics
    /// If the line is out of bounds.
    #[inline(always)]
    pub(crate) fn load<W: Pod, const WORDS: usize>(self, line: usize) -> [W; WORDS] {
        const { assert!(size_of::<[W; WORDS]>() == LINE_BYTES && align_of::<W>() <= LINE_BYTES) };
        assert!(line < self.count, "line {line} of {}", self.count);
        let first = self.first.wrapping_add(line * LINE_BYTES).cast::<W>();
        // SAFETY: `Volatile::lines` has checked that the line is in bounds and aligned; the caller
        // of `Volatile::new` has guaranteed the rest.
        std::array::from_fn(|word| unsafe { first.wrapping_add(word).read_volatile() })
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::tensor::DType;

    use super::*;

    /// Creates a range over a slice, which nothing writes.
    fn volatile(bytes: &[u8]) -> Volatile<'_> {
        // SAFETY: the borrow lasts as long as the result, and nothing writes the bytes.
        unsafe { Volatile::new(bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn copies_and_scans_work_at_any_alignment() {
        let halves = Exponents::of(DType::F16);
        for full in (0..256).step_by(2).map(Some).chain([None]) {
            let mut source: Vec<u8> = (0..=255).map(|byte| byte & 0x3b).collect();
            if let Some(full) = full {
                source[full + usize::from(cfg!(target_endian = "little"))] |= 0x7c;
            }
            for start in (0..40).step_by(2) {
                for length in [0, 2, 30, 32, 34, 64, 100, 256 - start] {
                    let mut to = [0; 256];
                    let found = volatile(&source[start..]).copy(&mut to[..length], halves);
                    assert_eq!(to[..length], source[start..start + length]);
                    assert!(to[length..].iter().all(|&byte| byte == 0), "and no more");
                    let within = full.is_some_and(|full| (start..start + length).contains(&full));
                    assert_eq!(found, within, "{length} at {start}, {full:?}");
                    let mut by_words = [0; 256];
                    let from = volatile(&source[start..]);
                    let found = from.copy_by_words::<u64>(&mut by_words[..length], halves);
                    assert_eq!((found, by_words), (within, to), "without wide words");
                }
            }
            assert!(!volatile(&source).copy(&mut [0; 256], Exponents::NONE));
        }
    }

    #[test]
    #[should_panic = "a word at 20 of 24"]
    fn a_word_beyond_the_end_is_rejected() {
        let words = [0_u64; 4];
        volatile(&bytemuck::cast_slice(&words)[..24]).load::<u64>(20);
    }

    #[test]
    #[should_panic = "a word at 4 of 32"]
    fn an_unaligned_word_is_rejected() {
        let words = [0_u64; 4];
        volatile(bytemuck::cast_slice(&words)).load::<u64>(4);
    }

    #[repr(align(64))]
    struct Aligned([u8; 256]);

    #[test]
    fn lines_are_loaded_by_index() {
        let bytes = Aligned(std::array::from_fn(|byte| byte as u8));
        let lines = volatile(&bytes.0[..255]).lines(64, 2);
        for (line, first) in [(0, 64), (1, 128)] {
            let loaded: [u8; 64] = bytemuck::cast(lines.load::<u64, 8>(line));
            assert_eq!(loaded, std::array::from_fn(|byte| first + byte as u8));
        }
    }

    #[test]
    #[should_panic = "line 2 of 2"]
    fn a_line_beyond_the_end_is_rejected() {
        volatile(&Aligned([0; 256]).0).lines(64, 2).load::<u64, 8>(2);
    }

    #[test]
    #[should_panic = "3 lines at 64 of 255"]
    fn a_partial_line_is_rejected() {
        volatile(&Aligned([0; 256]).0[..255]).lines(64, 3);
    }

    #[test]
    #[should_panic = "1 lines at 8 of 256"]
    fn an_unaligned_line_is_rejected() {
        volatile(&Aligned([0; 256]).0).lines(8, 1);
    }

    #[test]
    #[should_panic = "25 of 24 bytes"]
    fn a_copy_beyond_the_end_is_rejected() {
        volatile(&[0; 24]).copy(&mut [0; 25], Exponents::NONE);
    }
}
