//! Where a loop finds the gradient of a run.

use pushpull_common::finite::Exponents;

use super::kernel::Float;
use crate::volatile::{LINE_BYTES, Volatile, VolatileLines};

/// The gradient of a run.
#[derive(Debug)]
pub(crate) enum GradientRun<'a, T> {
    /// It lies there.
    Here(&'a [T]),
    /// It lies in memory that is lent.
    Shared(SharedRun<'a>),
}

/// The gradient of a run that another process may be writing, or the mean of some: each line of them is
/// loaded once, and looked at. They lie as far behind the start of a line of the cache as what is written.
#[derive(Debug)]
pub(crate) struct SharedRun<'a> {
    /// At least one, and at most [`MEAN_GRADIENTS_MAX`]. They are added up in this order.
    pub(crate) gradients: &'a [Volatile<'a>],
    /// At which of their bytes the run begins.
    pub(crate) at: usize,
    /// What their sum is divided by.
    pub(crate) over: u32,
    /// Which exponents are looked at.
    pub(crate) exponents: Exponents,
    /// Set if one of them is full.
    pub(crate) full: &'a mut bool,
}

/// Of how many gradients at most the mean is made by the loop that applies it: it goes through all of them at
/// once.
pub(crate) const MEAN_GRADIENTS_MAX: usize = 4;

/// A gradient in lines of so many elements. Each element is asked for once.
pub(super) trait Source<F, const N: usize> {
    /// An element.
    fn element(&mut self, at: usize) -> F;

    /// So many lines are asked for from now on, the first of which begins with this element.
    fn seek(&mut self, at: usize, lines: usize);

    /// One of those, by its number. `WIDE` says that the processor has AVX.
    fn line<const WIDE: bool>(&mut self, line: usize) -> [F; N];
}

/// One that lies there.
pub(super) struct Here<'a, F, const N: usize> {
    all: &'a [F],
    lines: &'a [[F; N]],
}

impl<'a, F, const N: usize> Here<'a, F, N> {
    pub(super) fn new(all: &'a [F]) -> Self {
        Here { all, lines: &[] }
    }
}

impl<F: Float, const N: usize> Source<F, N> for Here<'_, F, N> {
    #[inline(always)]
    fn element(&mut self, at: usize) -> F {
        self.all[at]
    }

    #[inline(always)]
    fn seek(&mut self, at: usize, lines: usize) {
        self.lines = &self.all[at..].as_chunks().0[..lines];
    }

    #[inline(always)]
    fn line<const WIDE: bool>(&mut self, line: usize) -> [F; N] {
        self.lines[line]
    }
}

/// One in memory that is lent.
pub(super) struct SharedGradient<'a> {
    part: Part<'a>,
    pub(super) looking: Looking,
}

impl<'a> SharedGradient<'a> {
    pub(super) fn new(gradient: Volatile<'a>, looking: Looking) -> SharedGradient<'a> {
        SharedGradient { part: Part::new(gradient), looking }
    }
}

impl<F: Float, const N: usize> Source<F, N> for SharedGradient<'_> {
    #[inline(always)]
    fn element(&mut self, at: usize) -> F {
        self.part.element(at, &mut self.looking)
    }

    #[inline(always)]
    fn seek(&mut self, at: usize, lines: usize) {
        self.part.seek::<F, N>(at, lines);
    }

    #[inline(always)]
    fn line<const WIDE: bool>(&mut self, line: usize) -> [F; N] {
        self.part.line::<F, N, WIDE>(line, &mut self.looking)
    }
}

/// The mean of some of them.
pub(super) struct Mean<'a, F> {
    parts: [Part<'a>; MEAN_GRADIENTS_MAX],
    count: usize,
    over: Over<F>,
    pub(super) looking: Looking,
}

/// How a sum is divided.
#[derive(Clone, Copy)]
enum Over<F> {
    /// The part is a power of two: to multiply by it gives the same bits, and a division takes several
    /// times as long.
    Times(F),
    Count(F),
}

impl<'a, F: Float> Mean<'a, F> {
    /// That of the bytes from some byte of these gradients on.
    pub(super) fn new(
        gradients: &[Volatile<'a>],
        at: usize,
        over: u32,
        looking: Looking,
    ) -> Mean<'a, F> {
        // There are no more than are used.
        let part = |place| Part::new(gradients.get(place).unwrap_or(&gradients[0]).behind(at));
        let count = F::of(over.into());
        let over = match over.is_power_of_two() {
            true => Over::Times(F::of(1.0) / count),
            false => Over::Count(count),
        };
        Mean { parts: std::array::from_fn(part), count: gradients.len(), over, looking }
    }

    #[inline(always)]
    fn sum<const N: usize>(
        &mut self,
        mut of: impl FnMut(&Part<'a>, &mut Looking) -> [F; N],
    ) -> [F; N] {
        let mut sum = of(&self.parts[0], &mut self.looking);
        for part in &self.parts[1..self.count] {
            for (sum, more) in sum.iter_mut().zip(of(part, &mut self.looking)) {
                *sum = *sum + more;
            }
        }
        match self.over {
            Over::Times(part) => sum.map(|sum| sum * part),
            Over::Count(count) => sum.map(|sum| sum / count),
        }
    }
}

impl<F: Float, const N: usize> Source<F, N> for Mean<'_, F> {
    #[inline(always)]
    fn element(&mut self, at: usize) -> F {
        let [mean] = self.sum(|part, looking| [part.element(at, looking)]);
        mean
    }

    #[inline(always)]
    fn seek(&mut self, at: usize, lines: usize) {
        self.parts.iter_mut().for_each(|part| part.seek::<F, N>(at, lines));
    }

    #[inline(always)]
    fn line<const WIDE: bool>(&mut self, line: usize) -> [F; N] {
        self.sum(|part, looking| part.line::<F, N, WIDE>(line, looking))
    }
}

/// What looks at gradients as they are loaded.
pub(super) struct Looking {
    exponents: Exponents,
    sums: [u64; LINE_BYTES / 8],
}

impl Looking {
    pub(super) fn new(exponents: Exponents) -> Looking {
        Looking { exponents, sums: Default::default() }
    }

    #[inline(always)]
    fn at_element<F: Float>(&mut self, element: F) {
        let mut word = [0; 8];
        word[..size_of::<F>()].copy_from_slice(bytemuck::bytes_of(&element));
        self.sums[0] |= self.exponents.plus_last(u64::from_ne_bytes(word));
    }

    #[inline(always)]
    fn at_line(&mut self, words: [u64; LINE_BYTES / 8]) {
        for (sum, word) in self.sums.iter_mut().zip(words) {
            *sum |= self.exponents.plus_last(word);
        }
    }

    /// Whether one of the exponents was full in what was loaded.
    pub(super) fn were_full(self) -> bool {
        self.exponents.were_full(self.sums.into_iter().fold(0, |all, sum| all | sum))
    }
}

/// One gradient, and the lines of it that are asked for.
struct Part<'a> {
    all: Volatile<'a>,
    lines: VolatileLines<'a>,
}

impl<'a> Part<'a> {
    fn new(all: Volatile<'a>) -> Part<'a> {
        Part { all, lines: VolatileLines::NONE }
    }

    #[inline(always)]
    fn element<F: Float>(&self, at: usize, looking: &mut Looking) -> F {
        let element = self.all.load(at * size_of::<F>());
        looking.at_element::<F>(element);
        element
    }

    #[inline(always)]
    fn seek<F: Float, const N: usize>(&mut self, at: usize, lines: usize) {
        const { assert!(size_of::<[F; N]>() == LINE_BYTES, "a line of the cache") };
        self.lines = self.all.lines(at * size_of::<F>(), lines);
    }

    #[inline(always)]
    fn line<F: Float, const N: usize, const WIDE: bool>(
        &self,
        line: usize,
        looking: &mut Looking,
    ) -> [F; N] {
        let words = self.words::<WIDE>(line);
        looking.at_line(words);
        let mut elements = [F::default(); N];
        // As bytes: whether an array lies aligned for words is looked at when it runs, for each line.
        bytemuck::cast_slice_mut::<F, u8>(&mut elements)
            .copy_from_slice(bytemuck::bytes_of(&words));
        elements
    }

    /// Loads a line by the widest words there are.
    #[inline(always)]
    fn words<const WIDE: bool>(&self, line: usize) -> [u64; LINE_BYTES / 8] {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m128i, __m256i};
            match WIDE {
                true => bytemuck::cast(self.lines.load::<__m256i, { LINE_BYTES / 32 }>(line)),
                false => bytemuck::cast(self.lines.load::<__m128i, { LINE_BYTES / 16 }>(line)),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.lines.load(line)
    }
}
