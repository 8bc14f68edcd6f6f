//! Embedding bags, on the threads of a pool.

use super::elementwise::ROWS_AT_ONCE;
use super::pool::ThreadPool;
use crate::kernels::embedding_bag::{Bags, Combiner};

impl ThreadPool {
    pub(crate) fn embedding_bag(
        &self,
        combiner: Combiner,
        table: &[f32],
        width: usize,
        bags: Bags<'_>,
        outputs: &mut [f32],
    ) {
        self.for_chunks(outputs, ROWS_AT_ONCE * width, |chunk, outputs| {
            for (bag, output) in (chunk * ROWS_AT_ONCE..).zip(outputs.chunks_exact_mut(width)) {
                output.fill(0.0);
                let ids = &bags.ids()[bags.range(bag)];
                let factor = combiner.factor(ids.len());
                for &id in ids {
                    let row = &table[id as usize * width..][..width];
                    output.iter_mut().zip(row).for_each(|(output, x)| *output += factor * x);
                }
            }
        });
    }

    /// Writes the gradient rows on the calling thread. The work is one scaled copy.
    pub(crate) fn embedding_bag_rows(
        &self,
        combiner: Combiner,
        width: usize,
        bags: Bags<'_>,
        gradients: &[f32],
        rows: &mut [f32],
    ) {
        let mut rest = rows;
        for (bag, gradient) in gradients.chunks_exact(width.max(1)).enumerate() {
            let ids = bags.range(bag).len();
            let factor = combiner.factor(ids);
            let (rows, others) = rest.split_at_mut(ids * width);
            for row in rows.chunks_exact_mut(width) {
                row.iter_mut().zip(gradient).for_each(|(x, gradient)| *x = factor * gradient);
            }
            rest = others;
        }
    }

    /// Adds the gradient rows on the calling thread. Two bags may have one id, and the order of
    /// additions counts.
    pub(crate) fn embedding_bag_add(
        &self,
        combiner: Combiner,
        table: &mut [f32],
        width: usize,
        bags: Bags<'_>,
        gradients: &[f32],
    ) {
        for (bag, gradient) in gradients.chunks_exact(width.max(1)).enumerate() {
            let ids = &bags.ids()[bags.range(bag)];
            let factor = combiner.factor(ids.len());
            for &id in ids {
                let row = &mut table[id as usize * width..][..width];
                row.iter_mut().zip(gradient).for_each(|(x, gradient)| *x += factor * gradient);
            }
        }
    }
}
