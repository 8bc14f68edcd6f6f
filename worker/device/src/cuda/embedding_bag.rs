//! Embedding bags as CUDA kernels, forwards and backwards.

use std::sync::Arc;

use super::cuda_device::CudaDevice;
use super::cuda_memory::{CudaMemory, CudaView, CudaViewMut};
use crate::error::ComputeError;
use crate::kernels::embedding_bag::{Bags, Combiner};
use crate::memory::DeviceElement;

impl CudaDevice {
    pub(crate) fn embedding_bag(
        self: &Arc<CudaDevice>,
        combiner: Combiner,
        table: CudaView<'_, f32>,
        width: usize,
        bags: Bags<'_>,
        outputs: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        let ids = self.upload(bags.ids())?;
        let ends = self.upload(&ends(bags))?;
        let arguments = [
            is_mean(combiner).into(),
            table.into(),
            width.into(),
            ids.view().into(),
            ends.view().into(),
            bags.len().into(),
            (&outputs).into(),
        ];
        // SAFETY: These are the parameters of the kernel. All ids name rows of the table, the ends
        // are within the ids, and there is an output of this width for each bag.
        unsafe { self.launch_over("embedding_bag", outputs.view().len(), &arguments) }
    }

    pub(crate) fn embedding_bag_rows(
        self: &Arc<CudaDevice>,
        combiner: Combiner,
        width: usize,
        bags: Bags<'_>,
        gradients: CudaView<'_, f32>,
        rows: CudaViewMut<'_, f32>,
    ) -> Result<(), ComputeError> {
        let ends = self.upload(&ends(bags))?;
        let arguments = [
            is_mean(combiner).into(),
            width.into(),
            ends.view().into(),
            bags.len().into(),
            gradients.into(),
            (&rows).into(),
        ];
        // SAFETY: These are the parameters of the kernel. There is a gradient of this width for
        // each bag, and a row for each id.
        unsafe { self.launch_over("embedding_bag_rows", gradients.len(), &arguments) }
    }

    pub(crate) fn embedding_bag_add(
        self: &Arc<CudaDevice>,
        combiner: Combiner,
        table: CudaViewMut<'_, f32>,
        width: usize,
        bags: Bags<'_>,
        gradients: CudaView<'_, f32>,
    ) -> Result<(), ComputeError> {
        let places = IdPlaces::of(combiner, bags);
        let ids = self.upload(&places.ids)?;
        let starts = self.upload(&places.starts)?;
        let of_bags = self.upload(&places.bags)?;
        let factors = self.upload(&places.factors)?;
        let arguments = [
            (&table).into(),
            width.into(),
            ids.view().into(),
            starts.view().into(),
            places.ids.len().into(),
            of_bags.view().into(),
            factors.view().into(),
            gradients.into(),
        ];
        // SAFETY: These are the parameters of the kernel. The ids are distinct rows of the table,
        // and the places of each name bags with a gradient.
        unsafe { self.launch_over("embedding_bag_add", places.ids.len() * width, &arguments) }
    }

    fn upload<T: DeviceElement>(
        self: &Arc<CudaDevice>,
        values: &[T],
    ) -> Result<CudaMemory<T>, ComputeError> {
        let mut memory = CudaMemory::new(self, values.len())?;
        self.write(values, memory.view_mut())?;
        Ok(memory)
    }
}

fn is_mean(combiner: Combiner) -> u32 {
    (combiner == Combiner::Mean).into()
}

fn ends(bags: Bags<'_>) -> Vec<u64> {
    (0..bags.len()).map(|bag| bags.range(bag).end as u64).collect()
}

/// The places of each distinct id in the bags, in the order of the bags.
#[derive(Debug, Default)]
struct IdPlaces {
    /// The distinct ids, in ascending order.
    ids: Vec<u64>,
    /// The index of each id's first place, and last the number of all places.
    starts: Vec<u64>,
    /// The bag of each place. `factors` has the factor of its gradient.
    bags: Vec<u64>,
    factors: Vec<f32>,
}

impl IdPlaces {
    fn of(combiner: Combiner, bags: Bags<'_>) -> IdPlaces {
        let mut all: Vec<(u64, u64, f32)> = Vec::with_capacity(bags.ids().len());
        for bag in 0..bags.len() {
            let ids = &bags.ids()[bags.range(bag)];
            let factor = combiner.factor(ids.len());
            all.extend(ids.iter().map(|&id| (id, bag as u64, factor)));
        }
        // Stable: the places of one id keep their order, and with it the rounding of their sum.
        all.sort_by_key(|(id, ..)| *id);
        let mut places = IdPlaces::default();
        for (place, (id, bag, factor)) in all.into_iter().enumerate() {
            if places.ids.last() != Some(&id) {
                places.ids.push(id);
                places.starts.push(place as u64);
            }
            places.bags.push(bag);
            places.factors.push(factor);
        }
        places.starts.push(places.bags.len() as u64);
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_an_id_keep_their_order() {
        let bags = Bags::new(&[9, 2, 9, 7, 2], &[2, 2, 5]).unwrap();
        let places = IdPlaces::of(Combiner::Sum, bags);
        assert_eq!((&places.ids[..], &places.starts[..]), (&[2, 7, 9][..], &[0, 2, 3, 5][..]));
        assert_eq!((&places.bags[..], &places.factors[..]), (&[0, 2, 2, 0, 2][..], &[1.0; 5][..]));
        assert_eq!(IdPlaces::of(Combiner::Mean, bags).factors[..2], [0.5, 1.0 / 3.0]);
        let none = IdPlaces::of(Combiner::Sum, Bags::new(&[], &[0]).unwrap());
        assert_eq!((none.ids.len(), &none.starts[..]), (0, &[0][..]));
    }
}
