//! [`Settings`]: what the emulated machine has.

use std::str::FromStr;

/// The settings of the emulated machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The number of devices.
    pub(crate) devices: usize,
    /// The newest version of CUDA that the driver supports, such as 12000.
    pub(crate) driver_version: i32,
    /// The bytes of memory of a device.
    pub(crate) memory_bytes: usize,
    /// The most instructions that a launch may execute.
    pub(crate) steps_max: u64,
    /// The compute capability of the devices, such as 90.
    pub(crate) compute_capability: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            devices: 1,
            driver_version: 12000,
            memory_bytes: 1 << 30,
            steps_max: 1_000_000_000,
            compute_capability: 90,
        }
    }
}

/// Calls that are to fail: `name:n:code`, where the name may be `*`.
pub(crate) type PlannedFailure = (String, u64, u32);

impl Settings {
    /// Reads settings and failures from variables of the environment, by a function that looks one
    /// up. A value that is no number is ignored.
    pub(crate) fn from_variables(
        lookup: impl Fn(&str) -> Option<String>,
    ) -> (Settings, Vec<PlannedFailure>) {
        let mut settings = Settings::default();
        set(&mut settings.devices, lookup("PUSHPULL_EMULATOR_DEVICES"));
        set(&mut settings.driver_version, lookup("PUSHPULL_EMULATOR_DRIVER_VERSION"));
        set(&mut settings.memory_bytes, lookup("PUSHPULL_EMULATOR_MEMORY"));
        let failures = lookup("PUSHPULL_EMULATOR_FAIL").unwrap_or_default();
        (settings, failures.split(',').filter_map(failure).collect())
    }

    /// The newest version of PTX that the driver compiles.
    pub(crate) fn ptx_version(&self) -> (u32, u32) {
        let version = self.driver_version.unsigned_abs();
        let major = version / 1000;
        let minor = version % 1000 / 10;
        let minor = match (major, minor) {
            (12, 6..) => minor - 1,
            _ => minor,
        };
        (major.saturating_sub(4), minor)
    }
}

fn set<T: FromStr>(value: &mut T, text: Option<String>) {
    if let Some(parsed) = text.and_then(|text| text.trim().parse().ok()) {
        *value = parsed;
    }
}

fn failure(text: &str) -> Option<PlannedFailure> {
    let mut parts = text.split(':');
    let name = parts.next()?.trim().to_owned();
    let nth = parts.next()?.trim().parse().ok()?;
    Some((name, nth, parts.next()?.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_replace_defaults() {
        let (settings, failures) = Settings::from_variables(|name| {
            Some(match name {
                "PUSHPULL_EMULATOR_DEVICES" => "3".to_owned(),
                "PUSHPULL_EMULATOR_DRIVER_VERSION" => "12080".to_owned(),
                "PUSHPULL_EMULATOR_MEMORY" => "nonsense".to_owned(),
                _ => "cuMemAlloc_v2:2:2,*:5:999,broken".to_owned(),
            })
        });
        assert_eq!((settings.devices, settings.memory_bytes), (3, 1 << 30));
        assert_eq!(settings.ptx_version(), (8, 7));
        assert_eq!(failures, [("cuMemAlloc_v2".to_owned(), 2, 2), ("*".to_owned(), 5, 999)]);
        assert_eq!(Settings::default().ptx_version(), (8, 0));
    }
}
