//! Embedding bags: one row per sample, from the rows of several ids.

use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{View, ViewMut};

/// The reduction of the rows of a bag to one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combiner {
    /// The sum of the rows. Zeros for an empty bag.
    Sum,
    /// The mean of the rows. Zeros for an empty bag.
    Mean,
}

impl Combiner {
    /// Returns the factor of each row in a bag of `ids` rows.
    pub(crate) fn factor(self, ids: usize) -> f32 {
        match self {
            Combiner::Sum => 1.0,
            Combiner::Mean => 1.0 / ids as f32,
        }
    }
}

/// Bags of ids, one for each sample, stored back to back.
#[derive(Clone, Copy, Debug)]
#[doc(alias = "embedding_lookup_sparse")]
pub struct Bags<'a> {
    ids: &'a [u64],
    ends: &'a [usize],
}

impl<'a> Bags<'a> {
    /// Creates bags. Bag `n` has the ids from the end of bag `n - 1`, or from 0, to `ends[n]`.
    ///
    /// # Errors
    /// [`ComputeError::Bag`] unless `ends` ascend to the number of ids.
    pub fn new(ids: &'a [u64], ends: &'a [usize]) -> Result<Bags<'a>, ComputeError> {
        let mut start = 0;
        for (bag, &end) in ends.iter().enumerate() {
            if end < start || end > ids.len() {
                return Err(ComputeError::Bag { bag, end, ids: ids.len() });
            }
            start = end;
        }
        match start == ids.len() {
            true => Ok(Bags { ids, ends }),
            // The last bag, or one that is missing, ends too early.
            false => {
                let bag = ends.len().saturating_sub(1);
                Err(ComputeError::Bag { bag, end: start, ids: ids.len() })
            }
        }
    }

    /// Returns the distinct ids in ascending order, and for each id its position among them. They
    /// are the rows to pull for a batch, and the ids of its bags in a table of these rows.
    ///
    /// Cost: a sort.
    pub fn distinct(ids: &[u64]) -> (Vec<u64>, Vec<u64>) {
        let mut distinct = ids.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let position = |id| distinct.partition_point(|&other| other < id) as u64;
        let positions = ids.iter().map(|&id| position(id)).collect();
        (distinct, positions)
    }

    /// Returns the number of bags, one for each sample.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there is no bag.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the ids of all bags.
    pub(crate) fn ids(&self) -> &'a [u64] {
        self.ids
    }

    /// Returns the range of a bag's ids in [`Bags::ids`].
    pub(crate) fn range(&self, bag: usize) -> std::ops::Range<usize> {
        let start = bag.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[bag]
    }

    fn check_ids(&self, rows: usize) -> Result<(), ComputeError> {
        let position = self.ids.iter().position(|&id| id >= rows as u64);
        match position {
            Some(position) => Err(ComputeError::Id { position, id: self.ids[position], rows }),
            None => Ok(()),
        }
    }
}

impl Device {
    /// Writes one row for each bag to `outputs`: the combined rows of its ids in `table`, which has
    /// rows of `width` elements.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `table` is not rows of `width`, or if `outputs` does not have
    /// `bags.len() * width` elements; [`ComputeError::Id`] for an id that is no row.
    pub fn embedding_bag<'a>(
        &self,
        combiner: Combiner,
        table: impl Into<View<'a, f32>>,
        width: usize,
        bags: Bags<'_>,
        outputs: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "embedding_bag";
        let table = table.into();
        let outputs = outputs.into();
        let rows = table.len().checked_div(width).unwrap_or(0);
        check_length(NAME, "the table", table.len(), rows * width)?;
        check_outputs(NAME, "outputs", bags, width, outputs.len())?;
        bags.check_ids(rows)?;
        match self.backend() {
            Backend::Cpu(pool) => {
                let table = table.host(NAME, "the table")?;
                pool.embedding_bag(combiner, table, width, bags, outputs.host(NAME, "outputs")?);
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let table = table.cuda(cuda, NAME, "the table")?;
                let outputs = outputs.cuda(cuda, NAME, "outputs")?;
                cuda.embedding_bag(combiner, table, width, bags, outputs)?;
            }
        }
        Ok(())
    }

    /// Writes one row for each id to `rows`: its gradient, from the gradients by the outputs of
    /// [`Device::embedding_bag`]. An id that occurs twice has two rows, and its gradient is their
    /// sum.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `gradients` does not have `bags.len() * width` elements, or
    /// `rows` a row of `width` for each id.
    pub fn embedding_bag_rows<'a>(
        &self,
        combiner: Combiner,
        width: usize,
        bags: Bags<'_>,
        gradients: impl Into<View<'a, f32>>,
        rows: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "embedding_bag_rows";
        let gradients = gradients.into();
        let rows = rows.into();
        check_outputs(NAME, "gradients", bags, width, gradients.len())?;
        let expected = bags.ids.len().saturating_mul(width);
        check_length(NAME, "rows", rows.len(), expected)?;
        match self.backend() {
            Backend::Cpu(pool) => {
                let gradients = gradients.host(NAME, "gradients")?;
                pool.embedding_bag_rows(combiner, width, bags, gradients, rows.host(NAME, "rows")?);
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let gradients = gradients.cuda(cuda, NAME, "gradients")?;
                let rows = rows.cuda(cuda, NAME, "rows")?;
                cuda.embedding_bag_rows(combiner, width, bags, gradients, rows)?;
            }
        }
        Ok(())
    }

    /// Adds to each row of `table` the gradients of its ids. The result equals the sum of the rows
    /// of [`Device::embedding_bag_rows`], added in their order.
    ///
    /// # Errors
    /// The errors of [`Device::embedding_bag`].
    #[doc(alias = "scatter_add")]
    pub fn embedding_bag_add<'a>(
        &self,
        combiner: Combiner,
        table: impl Into<ViewMut<'a, f32>>,
        width: usize,
        bags: Bags<'_>,
        gradients: impl Into<View<'a, f32>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "embedding_bag_add";
        let table = table.into();
        let gradients = gradients.into();
        let rows = table.len().checked_div(width).unwrap_or(0);
        check_length(NAME, "the table", table.len(), rows * width)?;
        check_outputs(NAME, "gradients", bags, width, gradients.len())?;
        bags.check_ids(rows)?;
        match self.backend() {
            Backend::Cpu(pool) => {
                let gradients = gradients.host(NAME, "gradients")?;
                let table = table.host(NAME, "the table")?;
                pool.embedding_bag_add(combiner, table, width, bags, gradients);
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let gradients = gradients.cuda(cuda, NAME, "gradients")?;
                let table = table.cuda(cuda, NAME, "the table")?;
                cuda.embedding_bag_add(combiner, table, width, bags, gradients)?;
            }
        }
        Ok(())
    }
}

fn check_outputs(
    kernel: &'static str,
    argument: &'static str,
    bags: Bags<'_>,
    width: usize,
    found: usize,
) -> Result<(), ComputeError> {
    let expected = bags.len().saturating_mul(width);
    check_length(kernel, argument, found, expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::elementwise::ROWS_AT_ONCE;
    use crate::kernels::testing::{assert_close, assert_gradients, random};

    const WIDTH: usize = 3;
    const ROWS: usize = 11;

    /// Bags of 0 to 4 ids, with ids that occur twice in one bag.
    fn lists() -> (Vec<u64>, Vec<usize>) {
        let mut ids = Vec::new();
        let mut ends = Vec::new();
        for bag in 0..(2 * ROWS_AT_ONCE + 5) as u64 {
            ids.extend((0..bag % 5).map(|k| (bag * 7 + k * k * 3) % ROWS as u64));
            ends.push(ids.len());
        }
        (ids, ends)
    }

    #[test]
    fn gradients_are_derivatives_on_any_number_of_threads() {
        let (ids, ends) = lists();
        let bags = Bags::new(&ids, &ends).unwrap();
        let table = random(1, ROWS * WIDTH);
        let weights = random(2, bags.len() * WIDTH);
        for combiner in [Combiner::Sum, Combiner::Mean] {
            let on = |threads| {
                let device = Device::cpu_threads(threads).unwrap();
                let mut outputs = vec![f32::NAN; bags.len() * WIDTH];
                device.embedding_bag(combiner, &table, WIDTH, bags, &mut outputs).unwrap();
                let mut rows = vec![f32::NAN; ids.len() * WIDTH];
                device.embedding_bag_rows(combiner, WIDTH, bags, &weights, &mut rows).unwrap();
                let mut sums = vec![0.0; table.len()];
                device.embedding_bag_add(combiner, &mut sums, WIDTH, bags, &weights).unwrap();
                (outputs, rows, sums)
            };
            let (outputs, rows, sums) = on(1);
            // The loss is the outputs, weighted.
            let loss = |table: &[f64]| {
                let mut loss = 0.0;
                for bag in 0..bags.len() {
                    let ids = &ids[bags.range(bag)];
                    for column in 0..WIDTH {
                        let values = ids.iter().map(|&id| table[id as usize * WIDTH + column]);
                        let sum: f64 = values.sum();
                        let combined = match combiner {
                            Combiner::Sum => sum,
                            Combiner::Mean => sum / ids.len().max(1) as f64,
                        };
                        loss += f64::from(weights[bag * WIDTH + column]) * combined;
                    }
                }
                loss
            };
            assert_gradients(&sums, &table, loss);
            let exact: Vec<f64> = table.iter().map(|&value| value.into()).collect();
            let weighted = outputs.iter().zip(&weights);
            let found: f64 = weighted.map(|(&x, &weight)| f64::from(x) * f64::from(weight)).sum();
            assert_close(found, loss(&exact), 1e-5);
            let mut added = vec![0.0; table.len()];
            for (&id, row) in ids.iter().zip(rows.chunks(WIDTH)) {
                let values = &mut added[id as usize * WIDTH..][..WIDTH];
                values.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            assert_eq!(added, sums);
            assert!(
                (2..=4).all(|threads| on(threads) == (outputs.clone(), rows.clone(), sums.clone()))
            );
        }
    }

    #[test]
    fn ids_and_bags_that_do_not_fit_are_refused() {
        let error = |ids: &[u64], ends: &[usize]| Bags::new(ids, ends).unwrap_err().to_string();
        let ends = "ends must ascend to the 3 ids";
        assert_eq!(error(&[1, 2, 3], &[2, 1]), format!("bag 1 ends at id 1: {ends}"));
        assert_eq!(error(&[1, 2, 3], &[4]), format!("bag 0 ends at id 4: {ends}"));
        assert_eq!(error(&[1, 2, 3], &[1, 2]), format!("bag 1 ends at id 2: {ends}"));
        assert_eq!(error(&[1, 2, 3], &[]), format!("bag 0 ends at id 0: {ends}"));
        assert!(Bags::new(&[], &[]).unwrap().is_empty());

        let device = Device::cpu_threads(1).unwrap();
        let bags = Bags::new(&[1, 4], &[2]).unwrap();
        let sum = Combiner::Sum;
        let mut outputs = [7.0; 2];
        let unknown = device.embedding_bag(sum, &[0.0; 8], 2, bags, &mut outputs).unwrap_err();
        let expected = "id 4 at position 1 is not below the 4 rows of the table";
        assert_eq!(unknown.to_string(), expected);
        let ragged = device.embedding_bag(sum, &[0.0; 9], 2, bags, &mut outputs).unwrap_err();
        assert_eq!(ragged.to_string(), "embedding_bag needs 8 elements of the table, not 9");
        let short = device.embedding_bag(sum, &[0.0; 10], 2, bags, &mut outputs[..1]).unwrap_err();
        assert_eq!(short.to_string(), "embedding_bag needs 2 elements of outputs, not 1");
        assert_eq!(outputs, [7.0; 2]);
        let mut rows = [7.0; 3];
        let short = device.embedding_bag_rows(sum, 2, bags, &[1.0; 2], &mut rows).unwrap_err();
        assert_eq!(short.to_string(), "embedding_bag_rows needs 4 elements of rows, not 3");
        let mut table = [7.0; 8];
        let unknown = device.embedding_bag_add(sum, &mut table, 2, bags, &[1.0; 2]).unwrap_err();
        assert_eq!(unknown.to_string(), expected);
        assert_eq!((rows, table), ([7.0; 3], [7.0; 8]));
        // Rows without elements.
        device.embedding_bag(sum, &[], 0, Bags::new(&[], &[0]).unwrap(), &mut []).unwrap();
    }
}
