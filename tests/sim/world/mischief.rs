//! Fault injection.

use super::{SimProcess, SimWorld};
use crate::chance::SimChance;
use crate::faults::FaultKind;
use crate::network::Connection;
use crate::process_program::ProcessProgram;

impl<P: ProcessProgram> SimWorld<P> {
    /// Draws one of the running processes that match.
    pub(crate) fn pick_alive(
        &self,
        chance: &mut SimChance,
        is: impl Fn(&SimProcess<P>) -> bool,
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
            FaultKind::KillOwner => self.kill_task(0, chance.millis(10, 1500)),
            FaultKind::KillShards => {
                let others = u64::from(self.setting.tasks) - 1;
                let draw = chance.next();
                others > 0 && self.kill_task(1 + (draw % others) as u32, chance.millis(10, 1500))
            }
            FaultKind::Refuse => {
                let Some(number) = self.pick_connection(chance) else { return false };
                let server = self.connections[&number].server;
                self.refused_until.insert(server, self.now + chance.millis(50, 2500));
                self.cut(number);
                true
            }
            FaultKind::Half | FaultKind::Late => false,
            _ => P::inject(self, fault, chance),
        }
    }

    pub(super) fn heal(&mut self) {
        self.healed = true;
        self.refused_until.clear();
        self.connections.values_mut().for_each(|connection| connection.slow = false);
    }
}
