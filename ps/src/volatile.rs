//! Bytes that another process may be writing while they are read: each is loaded once, what is made of it
//! is ours, and nothing of them is borrowed.
//!
//! This is one of the few files that may hold `unsafe` code.

use std::marker::PhantomData;

use bytemuck::Pod;
use pushpull_common::finite::Exponents;

/// A line of the cache.
pub(crate) const LINE_BYTES: usize = 64;

/// A stretch of such bytes. Of those that change while they are loaded, any content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Volatile<'a> {
    start: *const u8,
    bytes: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> Volatile<'a> {
    /// So many bytes.
    ///
    /// # Safety
    /// They must be valid for reads as long as this lives, and nothing in this process may write them, or borrow
    /// them if anybody writes them. Another process may write them: any bytes are a `u8`, and a value of what else is loaded, so
    /// nothing that is done with them depends on what they are but the values that are made of them.
    pub(crate) unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Volatile { start, bytes, memory: PhantomData }
    }

    /// Bytes of this process, which nobody changes: for what takes bytes where they lie.
    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        // SAFETY: they are borrowed for as long as this lives, so nobody writes them.
        unsafe { Volatile::new(bytes.as_ptr(), bytes.len()) }
    }

    /// Those behind the first so many.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn behind(self, first: usize) -> Volatile<'a> {
        assert!(first <= self.bytes, "behind {first} of {} bytes", self.bytes);
        Volatile { start: self.start.wrapping_add(first), bytes: self.bytes - first, ..self }
    }

    /// How far they lie behind a multiple of so many bytes.
    pub(crate) fn offset_in(self, bytes: usize) -> usize {
        self.start.addr() % bytes
    }

    /// Loads a word once, which the compiler must not change: so what is looked at is what something is
    /// made of.
    ///
    /// # Panics
    /// If there is none at this byte, or it does not lie aligned.
    #[inline(always)]
    pub(crate) fn load<W: Pod>(self, at: usize) -> W {
        let inside = at <= self.bytes && size_of::<W>() <= self.bytes - at;
        let word = self.start.wrapping_add(at).cast::<W>();
        assert!(inside && word.is_aligned(), "a word at {at} of {}", self.bytes);
        // SAFETY: it is inside, by the assertion, and aligned; the rest is what `new` was promised.
        unsafe { word.read_volatile() }
    }

    /// So many lines of the cache from this byte on.
    ///
    /// # Panics
    /// If there are not so many, or no line begins there.
    #[inline(always)]
    pub(crate) fn lines(self, at: usize, count: usize) -> VolatileLines<'a> {
        let Volatile { start, bytes, memory } = self.behind(at);
        let begins = count == 0 || start.addr().is_multiple_of(LINE_BYTES);
        assert!(count <= bytes / LINE_BYTES && begins, "{count} lines at {at} of {}", self.bytes);
        VolatileLines { first: start, count, memory }
    }

    /// Copies the first of them, as many as there is room for. Whether one of these exponents is full in
    /// what was copied.
    ///
    /// With loads and stores: the processor's own instruction for long copies, which the library takes for
    /// them, needs some time to begin, and over pieces of 2 KiB makes half as much.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn copy(self, to: &mut [u8], exponents: Exponents) -> bool {
        assert!(to.len() <= self.bytes, "{} of {} bytes", to.len(), self.bytes);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the feature.
            return unsafe { self.copy_wide(to, exponents) };
        }
        self.copy_by_words::<u64>(to, exponents)
    }

    /// The same by words of 32 bytes.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn copy_wide(self, to: &mut [u8], exponents: Exponents) -> bool {
        self.copy_by_words::<std::arch::x86_64::__m256i>(to, exponents)
    }

    /// The same by words of a type, and by bytes where they do not fit.
    #[inline(always)]
    fn copy_by_words<W: Pod>(self, to: &mut [u8], exponents: Exponents) -> bool {
        // To where the source is aligned.
        let head = self.start.align_offset(size_of::<W>()).min(to.len());
        let (first, rest) = to.split_at_mut(head);
        let mut words = rest.chunks_exact_mut(size_of::<W>());
        let (mut at, mut sums) = (head, [0; 4]);
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
            for (place, byte) in bytes.iter_mut().enumerate() {
                *byte = self.load(start + place);
            }
        }
        // Mostly there are none, and looking at nothing would take a tenth of it all.
        let ends = !(first.is_empty() && last.is_empty())
            && (exponents.are_full_in(first) || exponents.are_full_in(last));
        ends || exponents.were_full(sums.into_iter().fold(0, |all, sum| all | sum))
    }
}

/// Lines of the cache of such bytes. A loop over so many of them checks nothing for each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VolatileLines<'a> {
    first: *const u8,
    count: usize,
    memory: PhantomData<&'a [u8]>,
}

impl VolatileLines<'_> {
    /// No line.
    pub(crate) const NONE: VolatileLines<'static> =
        VolatileLines { first: std::ptr::null(), count: 0, memory: PhantomData };

    /// Loads the words of a line, as [`Volatile::load`] does.
    ///
    /// # Panics
    /// If there is no such line.
    #[inline(always)]
    pub(crate) fn load<W: Pod, const WORDS: usize>(self, line: usize) -> [W; WORDS] {
        const { assert!(size_of::<[W; WORDS]>() == LINE_BYTES && align_of::<W>() <= LINE_BYTES) };
        assert!(line < self.count, "line {line} of {}", self.count);
        let first = self.first.wrapping_add(line * LINE_BYTES).cast::<W>();
        // SAFETY: the line is one of those that `lines` has found inside and aligned; the rest is what
        // `Volatile::new` was promised.
        std::array::from_fn(|word| unsafe { first.wrapping_add(word).read_volatile() })
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::tensor::DType;

    use super::*;

    /// What nobody writes meanwhile.
    fn volatile(bytes: &[u8]) -> Volatile<'_> {
        // SAFETY: they are borrowed for as long, and nobody writes them.
        unsafe { Volatile::new(bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn bytes_are_copied_and_looked_at_wherever_they_start_and_end() {
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
    fn nothing_behind_it_is_loaded() {
        let words = [0_u64; 4];
        volatile(&bytemuck::cast_slice(&words)[..24]).load::<u64>(20);
    }

    #[test]
    #[should_panic = "a word at 4 of 32"]
    fn words_lie_aligned() {
        let words = [0_u64; 4];
        volatile(bytemuck::cast_slice(&words)).load::<u64>(4);
    }

    #[repr(align(64))]
    struct Aligned([u8; 256]);

    #[test]
    fn lines_are_loaded_by_their_number() {
        let bytes = Aligned(std::array::from_fn(|byte| byte as u8));
        let lines = volatile(&bytes.0[..255]).lines(64, 2);
        for (line, first) in [(0, 64), (1, 128)] {
            let loaded: [u8; 64] = bytemuck::cast(lines.load::<u64, 8>(line));
            assert_eq!(loaded, std::array::from_fn(|byte| first + byte as u8));
        }
    }

    #[test]
    #[should_panic = "line 2 of 2"]
    fn there_are_only_so_many_lines() {
        volatile(&Aligned([0; 256]).0).lines(64, 2).load::<u64, 8>(2);
    }

    #[test]
    #[should_panic = "3 lines at 64 of 255"]
    fn lines_are_whole() {
        volatile(&Aligned([0; 256]).0[..255]).lines(64, 3);
    }

    #[test]
    #[should_panic = "1 lines at 8 of 256"]
    fn lines_begin_where_those_of_the_cache_do() {
        volatile(&Aligned([0; 256]).0).lines(8, 1);
    }

    #[test]
    #[should_panic = "25 of 24 bytes"]
    fn nothing_behind_it_is_copied() {
        volatile(&[0; 24]).copy(&mut [0; 25], Exponents::NONE);
    }
}
