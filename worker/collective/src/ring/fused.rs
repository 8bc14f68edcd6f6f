//! Reductions of several tensors: small ones travel together.

use crate::element::RingElement;
use crate::error::RingError;
use crate::reduction::Reduction;
use crate::ring::Ring;

/// A tensor of a reduction of several.
#[derive(Debug)]
pub struct Tensor<'a, T> {
    /// Its name, which every rank must give.
    pub name: &'a str,
    /// Its elements.
    pub values: &'a mut [T],
}

/// The largest tensor that is copied to travel with others. The bytes of a larger
/// one take longer than its passes.
const FUSED_TENSOR_BYTES_MAX: usize = 256 << 10;

/// The bytes of tensors that travel together.
const FUSED_BYTES_MAX: usize = 4 << 20;

impl Ring {
    /// Reduces several tensors, as [`Ring::all_reduce_as`] does one after the other. Small ones
    /// that follow each other travel together, so that they share passes.
    ///
    /// # Errors
    /// As [`Ring::all_reduce`].
    #[doc(alias = "hvd.grouped_allreduce")]
    #[doc(alias = "hvd.DistributedOptimizer")]
    #[doc(alias = "HOROVOD_FUSION_THRESHOLD")]
    pub async fn all_reduce_fused<T: RingElement>(
        &mut self,
        tensors: &mut [Tensor<'_, T>],
        reduction: Reduction,
    ) -> Result<(), RingError> {
        let mut rest = tensors;
        while !rest.is_empty() {
            let (group, others) = rest.split_at_mut(group_length(rest));
            rest = others;
            match group {
                [Tensor { name, values }] => self.all_reduce_as(name, values, reduction).await?,
                group => self.reduce_group(group, reduction).await?,
            }
        }
        Ok(())
    }

    async fn reduce_group<T: RingElement>(
        &mut self,
        group: &mut [Tensor<'_, T>],
        reduction: Reduction,
    ) -> Result<(), RingError> {
        let mut together: Vec<T> = Vec::new();
        for tensor in group.iter() {
            together.extend_from_slice(tensor.values);
        }
        self.all_reduce_as(&group_name(group), &mut together, reduction).await?;
        let mut from = &together[..];
        for tensor in group.iter_mut() {
            let (own, others) = from.split_at(tensor.values.len());
            tensor.values.copy_from_slice(own);
            from = others;
        }
        self.metrics.fused_tensors += group.len() as u64;
        self.metrics.fused_operations += 1;
        Ok(())
    }
}

/// Returns how many of the first tensors travel together; at least one.
fn group_length<T>(tensors: &[Tensor<'_, T>]) -> usize {
    let mut bytes = 0;
    let fits = |tensor: &&Tensor<'_, T>| {
        let own = size_of_val(tensor.values);
        bytes += own;
        own <= FUSED_TENSOR_BYTES_MAX && bytes <= FUSED_BYTES_MAX
    };
    tensors.iter().take_while(fits).count().max(1)
}

/// Returns a name in which a difference of names or lengths shows: the names and lengths of all
/// tensors, which the protocol shortens, after a digest of them.
fn group_name<T>(group: &[Tensor<'_, T>]) -> String {
    let each = group.iter().map(|tensor| format!("{} [{}]", tensor.name, tensor.values.len()));
    let all = each.collect::<Vec<String>>().join(", ");
    format!("{:08x}: {all}", crc32c::crc32c(all.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_tensors_that_follow_each_other_travel_together() {
        let small = FUSED_TENSOR_BYTES_MAX;
        let large = small + 1;
        let lengths: &[(&[usize], usize)] = &[
            (&[1], 1),
            (&[large, 1], 1),
            (&[1, 2, 0, 3], 4),
            (&[1, 2, large, 3], 2),
            (&[small; 17], 16),
        ];
        for (lengths, together) in lengths {
            let mut tensors: Vec<Vec<u8>> = lengths.iter().map(|bytes| vec![0; *bytes]).collect();
            let tensors = tensors.iter_mut().map(|values| Tensor { name: "", values });
            let tensors: Vec<Tensor<'_, u8>> = tensors.collect();
            assert_eq!(group_length(&tensors), *together, "{lengths:?}");
        }
    }

    #[test]
    fn the_name_of_a_group_tells_names_and_lengths_apart() {
        let mut values = [0.0_f32; 3];
        let (a, b) = values.split_at_mut(1);
        let name = group_name(&[Tensor { name: "a", values: a }, Tensor { name: "b", values: b }]);
        assert!(name.ends_with(": a [1], b [2]"), "{name}");
    }
}
