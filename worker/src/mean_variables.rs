//! [`MeanVariables`]: what a replica adds to the variables that the servers average.

use std::ops::Range;

use bytes::Bytes;
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::DType;
use pushpull_common::variable::Replication;

use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::packed_variables::PackedVariables;
use crate::gradients::sharding_plan::ShardingPlan;

/// The variables that replicas average, and the values from which this replica's changes count.
///
/// An average has two parts. The replica adds its contribution, `(own - base) / replicas`, to the
/// servers' values. Then it takes the servers' values as its own and as its next base.
///
/// Invariant: a change of a value is in at most one contribution. The base becomes the replica's
/// own value once the contribution is sent, so one whose fate is unknown is not sent again.
#[derive(Debug)]
pub(crate) struct MeanVariables {
    packed: PackedVariables,
    /// The variables with the number of steps between two averages.
    intervals: Vec<(VariableId, u64)>,
    /// The number of replicas in the cluster.
    replicas: usize,
    base: AlignedBuffer,
    contribution: AlignedBuffer,
}

impl MeanVariables {
    /// Begins with the servers' values. `values` is a buffer of the plan.
    pub(crate) fn new(
        plan: &ShardingPlan,
        replicas: usize,
        values: &AlignedBuffer,
    ) -> MeanVariables {
        let every = |replication| match replication {
            Replication::Mean { every } => Some(every),
            Replication::Shared | Replication::Local => None,
        };
        let packed = PackedVariables::new(plan, |it| every(it.replication()).is_some());
        let of = |id| every(plan.catalogue().variable(id).replication()).map(|every| (id, every));
        let mut base = packed.buffer();
        let contribution = packed.buffer();
        packed.pack(values, &mut base);
        let intervals = packed.ids().filter_map(of).collect();
        MeanVariables { packed, intervals, replicas, base, contribution }
    }

    /// Returns the variables that are averaged after this many steps of the replica.
    pub(crate) fn due(&self, steps: u64) -> Vec<VariableId> {
        let is_due = |&&(_, every): &&(VariableId, u64)| steps > 0 && steps.is_multiple_of(every);
        self.intervals.iter().filter(is_due).map(|&(id, _)| id).collect()
    }

    /// Computes the contribution of a variable, and returns its elements.
    pub(crate) fn contribute(
        &mut self,
        plan: &ShardingPlan,
        id: VariableId,
        values: &AlignedBuffer,
    ) -> &[u8] {
        let range = plan.range(id);
        let packed = self.packed.locate(&range);
        let own = &values.bytes()[range];
        let base = &self.base.bytes()[packed.clone()];
        let out = &mut self.contribution.bytes_mut()[packed];
        let replicas = self.replicas as f64;
        match plan.catalogue().variable(id).dtype() {
            DType::F32 => {
                let own: &[f32] = bytemuck::cast_slice(own);
                let base: &[f32] = bytemuck::cast_slice(base);
                let out: &mut [f32] = bytemuck::cast_slice_mut(out);
                for ((out, &own), &base) in out.iter_mut().zip(own).zip(base) {
                    *out = ((f64::from(own) - f64::from(base)) / replicas) as f32;
                }
            }
            _ => {
                let own: &[f64] = bytemuck::cast_slice(own);
                let base: &[f64] = bytemuck::cast_slice(base);
                let out: &mut [f64] = bytemuck::cast_slice_mut(out);
                for ((out, &own), &base) in out.iter_mut().zip(own).zip(base) {
                    *out = (own - base) / replicas;
                }
            }
        }
        out
    }

    /// Returns a copy of the contributions to a range of the plan's buffer.
    pub(crate) fn body(&self, range: &Range<usize>) -> Bytes {
        Bytes::copy_from_slice(&self.contribution.bytes()[self.packed.locate(range)])
    }

    /// Makes the replica's values of a variable its base: its contribution is on its way, or the
    /// servers have these values.
    pub(crate) fn rebase(&mut self, plan: &ShardingPlan, id: VariableId, values: &AlignedBuffer) {
        let range = plan.range(id);
        let packed = self.packed.locate(&range);
        self.base.bytes_mut()[packed].copy_from_slice(&values.bytes()[range]);
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::tensor::Shape;
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::gradients::params::Params;
    use crate::testing::plans::plan_of;

    /// A trained `w`, and means `a` of `f32` and `b` of `f64` with these intervals.
    fn params(a: u64, b: u64) -> Params {
        let f64 = VariableSpec::new("b", DType::F64, Shape::new([1]).unwrap()).unwrap();
        let variables = vec![
            VariableSpec::f32("a", [2]).unwrap().mean_every_steps(a),
            VariableSpec::f32("w", [3]).unwrap(),
            f64.mean_every_steps(b),
        ];
        Params::new(plan_of(variables, 1))
    }

    const A: VariableId = VariableId(0);
    const B: VariableId = VariableId(2);

    #[test]
    fn variables_are_due_at_multiples_of_their_interval() {
        let params = params(2, 3);
        let means = MeanVariables::new(&params.plan, 1, &params.buffer);
        for (steps, due) in [
            (0, &[][..]),
            (1, &[]),
            (2, &[A]),
            (3, &[B]),
            (4, &[A]),
            (6, &[A, B]),
            (u64::MAX - 1, &[A]),
        ] {
            assert_eq!(means.due(steps), due, "{steps}");
        }
    }

    #[test]
    fn a_contribution_is_the_share_of_what_has_changed_since_the_base() {
        let mut params = params(1, 1);
        let plan = params.plan.clone();
        params.view_mut::<f32>("a").unwrap().copy_from_slice(&[1.0, 10.0]);
        let mut means = MeanVariables::new(&plan, 4, &params.buffer);
        params.view_mut::<f32>("a").unwrap().copy_from_slice(&[3.0, 6.0]);
        params.view_mut::<f64>("b").unwrap()[0] = 1.0;
        let a: Vec<f32> = bytemuck::cast_slice(means.contribute(&plan, A, &params.buffer)).to_vec();
        assert_eq!(a, [0.5, -1.0]);
        let b: Vec<f64> = bytemuck::cast_slice(means.contribute(&plan, B, &params.buffer)).to_vec();
        assert_eq!(b, [0.25]);
        assert_eq!(&means.body(&plan.range(A))[..], bytemuck::bytes_of(&[0.5_f32, -1.0]));
        // It is on its way: the same change does not count again, a later one does.
        means.rebase(&plan, A, &params.buffer);
        params.view_mut::<f32>("a").unwrap()[0] = 5.0;
        let a: &[f32] = bytemuck::cast_slice(means.contribute(&plan, A, &params.buffer));
        assert_eq!(a, [0.5, 0.0]);
    }

    /// Replicas that pull towards different targets, one after the other.
    #[test]
    fn replicas_converge_to_the_mean_of_their_targets() {
        let targets = [1.0_f32, 2.0, 6.0];
        let mut servers = 10.0_f32;
        let start = |_| {
            let mut params = params(1, 1);
            params.view_mut::<f32>("a").unwrap().fill(servers);
            let means = MeanVariables::new(&params.plan, targets.len(), &params.buffer);
            (params, means)
        };
        let mut replicas = targets.map(start);
        for _ in 0..400 {
            for ((params, means), target) in replicas.iter_mut().zip(targets) {
                let plan = params.plan.clone();
                let value = &mut params.view_mut::<f32>("a").unwrap()[0];
                *value = 0.9 * *value + 0.1 * target;
                let a: &[f32] = bytemuck::cast_slice(means.contribute(&plan, A, &params.buffer));
                servers += a[0];
                params.view_mut::<f32>("a").unwrap()[0] = servers;
                means.rebase(&plan, A, &params.buffer);
            }
        }
        assert!((servers - 3.0).abs() < 0.1, "{servers}");
    }
}
