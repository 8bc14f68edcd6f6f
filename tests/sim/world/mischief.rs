//! Fault injection.

use super::{ScheduledEvent, SimWorld, WorkerProcess};
use crate::chance::SimChance;
use crate::faults::FaultKind;
use crate::network::Connection;
use crate::setting::LEASE;

impl SimWorld {
    /// Draws one of the running processes that match.
    fn pick_alive(
        &self,
        chance: &mut SimChance,
        is: impl Fn(&WorkerProcess) -> bool,
    ) -> Option<usize> {
        let alive = self.processes.iter().enumerate().filter(|(_, process)| {
            process.is_alive && process.paused_until.is_none() && is(process)
        });
        chance.pick_named(alive.map(|(number, process)| (process.name(), number)))
    }

    /// Draws one of the accepted connections.
    fn pick_connection(&self, chance: &mut SimChance) -> Option<u64> {
        let up = self.connections.iter().filter(|(_, connection)| connection.is_up);
        let named = |connection: &Connection| {
            format!("{} to {}", self.name_of(connection.client), connection.server)
        };
        chance.pick_named(up.map(|(&number, connection)| (named(connection), number)))
    }

    /// Injects a planned fault, if it is possible now.
    pub(super) fn fault(&mut self, number: usize) {
        let fault = self.plan[number].fault;
        let mut chance = SimChance::of(self.setting.seed, &format!("fault {number}"));
        if self.inject(fault, &mut chance) {
            self.faults.insert(fault);
        }
    }

    fn inject(&mut self, fault: FaultKind, chance: &mut SimChance) -> bool {
        match fault {
            FaultKind::Cut => {
                let picked = self.pick_connection(chance);
                picked.map(|number| self.cut(number)).is_some()
            }
            FaultKind::Slow => {
                let picked = self.pick_connection(chance);
                let connection = picked.and_then(|number| self.connections.get_mut(&number));
                connection.map(|connection| connection.slow = true).is_some()
            }
            FaultKind::KillWorker | FaultKind::KillChief => {
                let chief = fault == FaultKind::KillChief;
                let killed = self.pick_alive(chance, |process| process.trainer.chief == chief);
                let Some(number) = killed else { return false };
                let task = self.processes[number].trainer.task;
                self.end_process(number);
                self.after(chance.millis(10, 2000), ScheduledEvent::Start(task));
                true
            }
            FaultKind::KillOwner => self.kill_task(0, chance.millis(10, 1500)),
            FaultKind::KillShards => {
                let others = u64::from(self.setting.tasks) - 1;
                let draw = chance.next();
                others > 0 && self.kill_task(1 + (draw % others) as u32, chance.millis(10, 1500))
            }
            FaultKind::Pause | FaultKind::Ghost => {
                let Some(number) = self.pick_alive(chance, |_| true) else { return false };
                let time = LEASE + chance.millis(100, 2500);
                self.processes[number].paused_until = Some(self.now + time);
                self.checker.worker_returns();
                if fault == FaultKind::Ghost {
                    let task = self.processes[number].trainer.task;
                    self.after(chance.millis(10, 1000), ScheduledEvent::Start(task));
                }
                true
            }
            FaultKind::Leave => {
                let leaves = self.pick_alive(chance, |process| !process.trainer.chief);
                leaves.map(|number| self.processes[number].trainer.leaves = true).is_some()
            }
            FaultKind::Hold => {
                let holds = self.pick_alive(chance, |process| process.trainer.holds.is_none());
                let timeout = self.setting.token_timeout.unwrap_or(LEASE);
                let time = timeout + chance.millis(50, 1000);
                holds.map(|number| self.processes[number].trainer.holds = Some(time)).is_some()
            }
            FaultKind::Cancel => {
                let now = self.now;
                let Some(number) = self.pick_alive(chance, |_| true) else { return false };
                let WorkerProcess { endpoint, trainer, .. } = &mut self.processes[number];
                let cancelled = trainer.cancel(now, endpoint, &mut self.checker);
                self.settle_process(number);
                cancelled
            }
            FaultKind::Half | FaultKind::Late => false,
        }
    }

    pub(super) fn heal(&mut self) {
        self.healed = true;
        self.connections.values_mut().for_each(|connection| connection.slow = false);
    }
}
