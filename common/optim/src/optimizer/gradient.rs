//! The gradient of a run: in a slice, or in shared memory.

use bytemuck::Pod;
use pushpull_common::finite::Exponents;

use super::float::OptimizerFloat;
use crate::volatile::{LINE_BYTES, Volatile, VolatileLines};

/// The gradient of a run.
#[derive(Debug)]
pub enum GradientRun<'a, T> {
    /// In a slice.
    Local(&'a [T]),
    /// In shared memory. Each cache line is loaded once and scanned. All gradients have the same
    /// offset within a cache line as the destination.
    Shared {
        /// The gradient, or those whose mean it is.
        run: SharedRun<'a>,
        /// Set if any exponent among them is full.
        full: &'a mut bool,
    },
}

impl<'a> GradientRun<'a, u8> {
    /// Reads bytes as elements, for which they are aligned.
    pub fn cast<T: Pod>(self) -> GradientRun<'a, T> {
        match self {
            GradientRun::Local(bytes) => GradientRun::Local(bytemuck::cast_slice(bytes)),
            GradientRun::Shared { run, full } => GradientRun::Shared { run, full },
        }
    }
}

/// A gradient in memory that another process may be writing, or several whose mean is the gradient.
/// All start at the same byte.
#[derive(Debug)]
pub struct SharedRun<'a> {
    /// At least one gradient and at most [`MEAN_GRADIENTS_MAX`], in the order of summation.
    pub gradients: &'a [Volatile<'a>],
    /// The byte of each gradient at which the run begins.
    pub at: usize,
    /// The divisor of their sum.
    pub divisor: u32,
    /// The exponents to scan.
    pub exponents: Exponents,
}

impl SharedRun<'_> {
    /// Returns whether every gradient starts at this offset within a cache line.
    pub fn has_line_offset(&self, line_offset: usize) -> bool {
        let mut gradients = self.gradients.iter();
        gradients.all(|gradient| gradient.skip(self.at).offset_in(LINE_BYTES) == line_offset)
    }
}

/// The maximum number of gradients whose mean is computed by the loop that applies it. The loop
/// reads all of them together.
pub const MEAN_GRADIENTS_MAX: usize = 4;

/// A source of a gradient in lines of `N` elements. Each element is read once.
pub(super) trait GradientSource<F, const N: usize> {
    /// Returns an element.
    fn element(&mut self, at: usize) -> F;

    /// Prepares to read `lines` lines, the first of which starts at this element.
    fn seek(&mut self, at: usize, lines: usize);

    /// Returns the line with this index. `WIDE` means that the processor has AVX.
    fn line<const WIDE: bool>(&mut self, line: usize) -> [F; N];
}

/// A gradient in a slice.
pub(super) struct LocalGradient<'a, F, const N: usize> {
    all: &'a [F],
    lines: &'a [[F; N]],
}

impl<'a, F, const N: usize> LocalGradient<'a, F, N> {
    pub(super) fn new(all: &'a [F]) -> Self {
        LocalGradient { all, lines: &[] }
    }
}

impl<F: OptimizerFloat, const N: usize> GradientSource<F, N> for LocalGradient<'_, F, N> {
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

/// A gradient in shared memory.
pub(super) struct SharedGradient<'a> {
    part: GradientPart<'a>,
    pub(super) scan: ExponentScan,
}

impl<'a> SharedGradient<'a> {
    pub(super) fn new(gradient: Volatile<'a>, scan: ExponentScan) -> SharedGradient<'a> {
        SharedGradient { part: GradientPart::new(gradient), scan }
    }
}

impl<F: OptimizerFloat, const N: usize> GradientSource<F, N> for SharedGradient<'_> {
    #[inline(always)]
    fn element(&mut self, at: usize) -> F {
        self.part.element(at, &mut self.scan)
    }

    #[inline(always)]
    fn seek(&mut self, at: usize, lines: usize) {
        self.part.seek::<F, N>(at, lines);
    }

    #[inline(always)]
    fn line<const WIDE: bool>(&mut self, line: usize) -> [F; N] {
        self.part.line::<F, N, WIDE>(line, &mut self.scan)
    }
}

/// The mean of several gradients in shared memory.
pub(super) struct MeanGradient<'a, F> {
    parts: [GradientPart<'a>; MEAN_GRADIENTS_MAX],
    count: usize,
    divisor: Divisor<F>,
    pub(super) scan: ExponentScan,
}

/// The divisor of a sum.
#[derive(Clone, Copy)]
enum Divisor<F> {
    /// The reciprocal of a power of two. A multiplication by it gives the same bits, and a division
    /// takes several times as long.
    Reciprocal(F),
    Count(F),
}

impl<'a, F: OptimizerFloat> MeanGradient<'a, F> {
    /// Creates the mean of these gradients from byte `at` on.
    pub(super) fn new(
        gradients: &[Volatile<'a>],
        at: usize,
        divisor: u32,
        scan: ExponentScan,
    ) -> MeanGradient<'a, F> {
        // The unused parts repeat the first gradient.
        let part =
            |index| GradientPart::new(gradients.get(index).unwrap_or(&gradients[0]).skip(at));
        let count = F::of(divisor.into());
        let divisor = match divisor.is_power_of_two() {
            true => Divisor::Reciprocal(F::of(1.0) / count),
            false => Divisor::Count(count),
        };
        MeanGradient { parts: std::array::from_fn(part), count: gradients.len(), divisor, scan }
    }

    #[inline(always)]
    fn sum<const N: usize>(
        &mut self,
        mut of: impl FnMut(&GradientPart<'a>, &mut ExponentScan) -> [F; N],
    ) -> [F; N] {
        let mut sum = of(&self.parts[0], &mut self.scan);
        for part in &self.parts[1..self.count] {
            for (sum, more) in sum.iter_mut().zip(of(part, &mut self.scan)) {
                *sum = *sum + more;
            }
        }
        match self.divisor {
            Divisor::Reciprocal(part) => sum.map(|sum| sum * part),
            Divisor::Count(count) => sum.map(|sum| sum / count),
        }
    }
}

impl<F: OptimizerFloat, const N: usize> GradientSource<F, N> for MeanGradient<'_, F> {
    #[inline(always)]
    fn element(&mut self, at: usize) -> F {
        let [mean] = self.sum(|part, scan| [part.element(at, scan)]);
        mean
    }

    #[inline(always)]
    fn seek(&mut self, at: usize, lines: usize) {
        self.parts.iter_mut().for_each(|part| part.seek::<F, N>(at, lines));
    }

    #[inline(always)]
    fn line<const WIDE: bool>(&mut self, line: usize) -> [F; N] {
        self.sum(|part, scan| part.line::<F, N, WIDE>(line, scan))
    }
}

/// Scans the exponents of a gradient as it is loaded.
pub(super) struct ExponentScan {
    exponents: Exponents,
    sums: [u64; LINE_BYTES / 8],
}

impl ExponentScan {
    pub(super) fn new(exponents: Exponents) -> ExponentScan {
        ExponentScan { exponents, sums: Default::default() }
    }

    #[inline(always)]
    fn add_element<F: OptimizerFloat>(&mut self, element: F) {
        let mut word = [0; 8];
        word[..size_of::<F>()].copy_from_slice(bytemuck::bytes_of(&element));
        self.sums[0] |= self.exponents.plus_last(u64::from_ne_bytes(word));
    }

    #[inline(always)]
    fn add_line(&mut self, words: [u64; LINE_BYTES / 8]) {
        for (sum, word) in self.sums.iter_mut().zip(words) {
            *sum |= self.exponents.plus_last(word);
        }
    }

    /// Returns whether any loaded exponent was full.
    pub(super) fn were_full(self) -> bool {
        self.exponents.were_full(self.sums.into_iter().fold(0, |all, sum| all | sum))
    }
}

/// One gradient, and the lines to be read.
struct GradientPart<'a> {
    all: Volatile<'a>,
    lines: VolatileLines<'a>,
}

impl<'a> GradientPart<'a> {
    fn new(all: Volatile<'a>) -> GradientPart<'a> {
        GradientPart { all, lines: VolatileLines::NONE }
    }

    #[inline(always)]
    fn element<F: OptimizerFloat>(&self, at: usize, scan: &mut ExponentScan) -> F {
        let element = self.all.load(at * size_of::<F>());
        scan.add_element::<F>(element);
        element
    }

    #[inline(always)]
    fn seek<F: OptimizerFloat, const N: usize>(&mut self, at: usize, lines: usize) {
        const { assert!(size_of::<[F; N]>() == LINE_BYTES, "a line of the cache") };
        self.lines = self.all.lines(at * size_of::<F>(), lines);
    }

    #[inline(always)]
    fn line<F: OptimizerFloat, const N: usize, const WIDE: bool>(
        &self,
        line: usize,
        scan: &mut ExponentScan,
    ) -> [F; N] {
        let words = self.words::<WIDE>(line);
        scan.add_line(words);
        let mut elements = [F::default(); N];
        // A cast to bytes, because a cast to words would check the array's alignment at run time,
        // for each line.
        bytemuck::cast_slice_mut::<F, u8>(&mut elements)
            .copy_from_slice(bytemuck::bytes_of(&words));
        elements
    }

    /// Loads a line in the widest words of the processor.
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
