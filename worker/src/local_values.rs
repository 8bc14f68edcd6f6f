//! [`LocalValues`]: the values that a replica keeps while it joins again.

use std::sync::Arc;

use pushpull_common::variable::Replication;

use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::packed_variables::PackedVariables;
use crate::gradients::params::Params;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::JoinedEpoch;
use crate::worker::Worker;

/// A replica's values of its local variables, with the restore epoch and the step in which it
/// changed them.
#[derive(Debug)]
pub struct LocalValues {
    plan: Arc<ShardingPlan>,
    epoch: JoinedEpoch,
    step: u64,
    packed: PackedVariables,
    values: AlignedBuffer,
}

impl LocalValues {
    /// Copies the local variables of a worker's replica; `None` if there are none.
    pub fn kept(params: &Params, worker: &Worker) -> Option<LocalValues> {
        LocalValues::of(params, worker.joined_epoch)
    }

    /// Replaces the servers' values of local variables, which a worker has pulled when it joined
    /// again, by these, unless the servers have gone back to a checkpoint or to the start since:
    /// then their values count, as for all other variables.
    pub fn restore(&self, params: &mut Params, worker: &Worker) {
        self.restore_in(params, worker.joined_epoch);
    }

    fn of(params: &Params, epoch: JoinedEpoch) -> Option<LocalValues> {
        let plan = params.plan.clone();
        let packed = PackedVariables::new(&plan, |it| it.replication() == Replication::Local);
        if packed.is_empty() {
            return None;
        }
        let mut values = packed.buffer();
        packed.pack(&params.buffer, &mut values);
        Some(LocalValues { plan, epoch, step: params.step(), packed, values })
    }

    fn restore_in(&self, params: &mut Params, epoch: JoinedEpoch) {
        let has_gone_back = epoch != self.epoch || params.step() < self.step;
        if !has_gone_back && params.plan.is_same(&self.plan) {
            self.packed.unpack(&self.values, &mut params.buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::RestoreEpoch;
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::testing::plans::plan_of;

    fn params(value: f32) -> Params {
        let f32 = |name| VariableSpec::f32(name, [1]).unwrap();
        let variables = vec![f32("w"), f32("local").local(), f32("mean").mean_every_steps(2)];
        let mut params = Params::new(plan_of(variables, 1));
        for name in ["w", "local", "mean"] {
            params.view_mut::<f32>(name).unwrap()[0] = value;
        }
        params
    }

    #[test]
    fn local_values_survive_a_join_unless_the_servers_have_gone_back() {
        let mut before = params(1.0);
        before.step.0 = 12;
        let joined_in = |epoch, arena| JoinedEpoch { epoch: RestoreEpoch(epoch), arena };
        let kept = LocalValues::of(&before, joined_in(3, 1)).unwrap();
        let table = [
            (3, 1, 12, 1.0),
            (3, 1, 15, 1.0),
            (4, 1, 12, 2.0),
            (3, 1, 11, 2.0),
            // The servers have lost all state since, and count the same epoch.
            (3, 2, 15, 2.0),
        ];
        for (epoch, arena, step, local) in table {
            let mut joined = params(2.0);
            joined.step.0 = step;
            kept.restore_in(&mut joined, joined_in(epoch, arena));
            let [w, found, mean] = joined.views::<f32, 3>(["w", "local", "mean"]).unwrap();
            assert_eq!((w, found, mean), (&[2.0][..], &[local][..], &[2.0][..]), "{epoch} {step}");
        }
        let none = Params::new(plan_of(vec![VariableSpec::f32("w", [1]).unwrap()], 1));
        assert!(LocalValues::of(&none, joined_in(3, 1)).is_none());
    }
}
